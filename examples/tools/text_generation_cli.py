"""Send prompts to a text generation server: ``text_generation_cli.py HOST:PORT``.

Standard library only; an empty prompt or the end of the input ends it.
"""

import json
import sys
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def main(argv, fields=None):
    """Read prompts until there is none; return the exit code."""
    if len(argv) != 1:
        print("usage: text_generation_cli.py HOST:PORT", file=sys.stderr)
        return 2
    url = f"http://{argv[0]}/api"
    while prompt := ask("Enter prompt: "):
        num_tokens = ask("Enter number of tokens to generate: ")
        body = {"prompts": [prompt], **(fields or {})}
        if num_tokens:
            body["tokens_to_generate"] = int(num_tokens)
        request = Request(
            url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="PUT"
        )
        try:
            with urlopen(request) as answer:
                print("Response:")
                print(json.load(answer)["text"][0])
        except HTTPError as error:
            print(f"Error {error.code}: {json.load(error)}")
    return 0


def ask(question):
    """Return a line, empty at the end of the input."""
    print(question, end="", flush=True)
    return sys.stdin.readline().rstrip("\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
