"""Request bodies as pydantic models, which validate bodies and give the OpenAPI schema.

Every field of OpenAI's interfaces is declared: with an effect, as a field without effect, or in
a model's ``refused`` with the reason. A field with the value null counts as left out.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from mcore_base.command_line import unknown
from mcore_infer.config import MAX_SEED

MAX_TEXTS = 128
"""Most texts of one request: prompts times ``n``."""
MAX_TOP = 20
MAX_PARTS = 1 << 16
"""Most objects, lists or fields of a body."""
_MAX_STOP_CHARACTERS = 1024
_MAX_TOKENS = 2**31
_CONTENT = "a string or a list of parts of text"
_OTHER_STRUCTURES = dict.fromkeys(
    ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    "is a field of vLLM's own: use response_format.",
)
_RESERVED_FOR_TEMPLATE = {"messages", "add_generation_prompt", "tools"}


class RequestError(Exception):
    """Error that becomes a response: a fault of the request, or of the server.

    Attributes:
        status: HTTP status.
        message: one line.
        field: wrong field of the body; empty: no single field.
        code: error code for programs; empty: the status is the code.
    """

    def __init__(self, status: int, message: str, field: str = "", code: str = "") -> None:
        super().__init__(message)
        self.status, self.message, self.field, self.code = status, message, field, code


class _FieldError(ValueError):
    """A field that is unknown or refused, or fields that exclude each other."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field[:100]


def _add_null(schema: dict[str, Any]) -> None:
    """Allow null for every optional field in the JSON schema."""
    required = schema.get("required", ())
    for name, part in schema.get("properties", {}).items():
        part.pop("title", None)
        if name not in required and part:
            schema["properties"][name] = {"anyOf": [part, {"type": "null"}]}
    schema.pop("title", None)


class Body(BaseModel):
    """A JSON object of known fields."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, json_schema_extra=_add_null
    )
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields of the interface that are refused, with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        values = {name: value for name, value in body.items() if value is not None}
        fields = {field.alias or name for name, field in cls.model_fields.items()}
        for name in values.keys() - fields:  # the first wrong name is reported
            if name in cls.refused:
                message = f"{name} {cls.refused[name]}"
            else:
                message = unknown(name[:100], fields, "field")
            raise _FieldError(name, message)
        return values


AnyBody = TypeVar("AnyBody", bound=Body)
_NoEffect = Annotated[Any, Field(description="Has no effect.")]
_Tokens = Annotated[int, Field(ge=1, le=_MAX_TOKENS)]
_Stop = Annotated[str, Field(min_length=1, max_length=_MAX_STOP_CHARACTERS)]
_TokenId = Annotated[int, Field(ge=0, le=_MAX_TOKENS)]


class StreamOptions(Body):
    """Options of streams."""

    include_usage: bool = False
    include_obfuscation: _NoEffect = None


class SchemaFormat(Body):
    """A JSON schema with a name."""

    schema_: dict[str, Any] = Field(alias="schema")
    name: _NoEffect = None
    description: _NoEffect = None
    strict: _NoEffect = None


class ResponseFormat(Body):
    """Format that a text must have."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: SchemaFormat | None = None
    pattern: str | None = Field(None, description="Regular expression, if type is regex.")

    @model_validator(mode="after")
    def _has_parts(self) -> Self:
        for kind, name in (("json_schema", "json_schema"), ("regex", "pattern")):
            if (self.type == kind) != (getattr(self, name) is not None):
                raise ValueError(f"type {kind} and {name} must be given together")
        return self


class TextBody(Body):
    """Fields of both completions and chats."""

    model: str | None = Field(None, description="A name of /v1/models.")
    temperature: float | None = Field(
        None, ge=0, le=100, description="0: greedy decoding. Default: the model's, or 1."
    )
    top_p: float | None = Field(None, gt=0, le=1, description="Default: the model's, or 1.")
    top_k: int | None = Field(
        None, ge=-1, le=_MAX_TOKENS, description="0, -1: all. Default: the model's, or 0."
    )
    min_p: float | None = Field(None, ge=0, le=1, description="Default: the model's, or 0.")
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="Default: the model's, or 1."
    )
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: dict[
        Annotated[str, Field(pattern="^[0-9]{1,9}$")],
        Annotated[float, Field(ge=-100, le=100)],
    ] = Field(default={}, max_length=1024)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int = Field(1, ge=1, le=MAX_TEXTS)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=16)] = Field(
        default=[],
        description="a string or a list of at most 16, none empty or longer than 1024",
    )
    stop_token_ids: list[_TokenId] = Field(default=[], max_length=64)
    min_tokens: int = Field(0, ge=0, le=_MAX_TOKENS)
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    user: _NoEffect = None
    metadata: _NoEffect = None
    store: _NoEffect = None
    service_tier: _NoEffect = None
    safety_identifier: _NoEffect = None
    prompt_cache_key: _NoEffect = None
    prompt_cache_retention: _NoEffect = None
    prompt_cache_options: _NoEffect = None
    moderation: _NoEffect = None


def _check_ids(ids: list[int]) -> list[int]:
    if min(ids) < 0:
        raise ValueError("token ids are 0 or more")
    return ids


_Ids = Annotated[list[int], Field(min_length=1), AfterValidator(_check_ids)]
_Prompts = Annotated[list[str | _Ids], Field(min_length=1, max_length=MAX_TEXTS)]


def _kind_of_prompt(prompt: Any) -> str:
    """Return the kind of a prompt, from its type and its first element.

    Without this tag, pydantic would validate every id against every kind.
    """
    if isinstance(prompt, list):
        return "ids" if prompt and isinstance(prompt[0], int) else "many"
    return "text"


class CompletionBody(TextBody):
    """``POST /v1/completions``."""

    refused: ClassVar[Mapping[str, str]] = _OTHER_STRUCTURES
    prompt: Annotated[
        Annotated[str, Tag("text")]
        | Annotated[_Ids, Tag("ids")]
        | Annotated[_Prompts, Tag("many")],
        Discriminator(_kind_of_prompt),
    ] = Field(
        description=f"a string, a list of token ids, or a list of at most {MAX_TEXTS} of either"
    )
    max_tokens: int = Field(16, ge=0, le=_MAX_TOKENS)
    logprobs: int | None = Field(None, ge=0, le=MAX_TOP)
    echo: bool = False
    best_of: int | None = Field(None, ge=1, le=MAX_TEXTS)
    suffix: Literal[""] = Field(
        "", description="empty: text can only be written after the prompt"
    )

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if not self.max_tokens and not self.echo:
            raise _FieldError("max_tokens", "max_tokens=0 needs echo=true.")
        if self.best_of not in (None, self.n):
            raise _FieldError("best_of", "best_of must be equal to n: every text is returned.")
        if self.stream and self.echo and self.logprobs is not None:
            raise _FieldError("stream", "echo with logprobs cannot be streamed.")
        return self


class Part(BaseModel):
    """A part of a message: text."""

    model_config = ConfigDict(extra="ignore", strict=True)
    type: Literal["text"]
    text: str


class Function(Body):
    """A function that the model may call."""

    name: str = Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] = {"type": "object", "properties": {}}
    strict: _NoEffect = None

    @model_validator(mode="after")
    def _takes_an_object(self) -> Self:
        types = self.parameters.get("type", "object")
        if "object" not in (types if isinstance(types, list) else [types]):
            raise ValueError(
                f"function {self.name}: its parameters have the type {str(types)[:100]}, but "
                "must be object, with a property for each argument."
            )
        return self


class Tool(Body):
    """A tool that the model may use."""

    refused: ClassVar[Mapping[str, str]] = {
        "custom": "is not supported: give functions, whose parameters are JSON.",
    }
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A function by its name."""

    name: str


class NamedTool(Body):
    """The tool that must be called."""

    type: Literal["function"] = "function"
    function: FunctionName


class AllowedTools(Body):
    """The tools that may be called, and whether a call is required."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=128)


class AllowedToolChoice(Body):
    """A ``tool_choice`` that lists the allowed tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class CalledFunction(BaseModel):
    """An earlier call of a function; arguments are JSON."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] = ""


class ToolCall(BaseModel):
    """An earlier call of a tool."""

    model_config = ConfigDict(extra="allow")
    function: CalledFunction


class Message(BaseModel):
    """One message of a chat; unknown fields are passed to the chat template."""

    model_config = ConfigDict(extra="allow")
    role: str
    content: str | list[Part] | None = Field(None, description=_CONTENT)
    tool_calls: list[ToolCall] | None = None


class ChatBody(TextBody):
    """``POST /v1/chat/completions``."""

    refused: ClassVar[Mapping[str, str]] = {
        "functions": "is no longer used: give tools and tool_choice.",
        "function_call": "is no longer used: give tools and tool_choice.",
        "audio": "is not supported: answers are text.",
        "web_search_options": "is not supported: this server does not search.",
        **_OTHER_STRUCTURES,
    }
    messages: list[Message] = Field(min_length=1, max_length=10_000)
    max_completion_tokens: _Tokens | None = None
    max_tokens: _Tokens | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    modalities: list[Literal["text"]] = ["text"]
    tools: list[Tool] = Field(default=[], max_length=128)
    tool_choice: Literal["auto", "none", "required"] | NamedTool | AllowedToolChoice = Field(
        default="auto",
        description="auto, none, required, a function by its name, or allowed_tools",
    )
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = Field(
        None, max_length=20, description="For the chat template; none: enable_thinking=false."
    )
    chat_template_kwargs: dict[str, Any] = {}
    prediction: _NoEffect = None
    verbosity: _NoEffect = None

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _FieldError("top_logprobs", "top_logprobs needs logprobs=true.")
        if len({self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            message = (
                f"max_tokens {self.max_tokens} and max_completion_tokens "
                f"{self.max_completion_tokens} contradict each other: give one of them."
            )
            raise _FieldError("max_completion_tokens", message)
        if any(turn.content is None and not turn.tool_calls for turn in self.messages):
            raise _FieldError(
                "messages", "messages: each message must have content or tool_calls."
            )
        for name in _RESERVED_FOR_TEMPLATE & self.chat_template_kwargs.keys():
            field = "chat_template_kwargs"
            raise _FieldError(field, f"{field} must not contain {name}.")
        names = {tool.function.name for tool in self.tools}
        for name in self.chosen_names or ():
            if name not in names:
                message = f"tool_choice: {name[:100]} is not one of the tools."
                raise _FieldError("tool_choice", message)
        if self.tool_choice == "required" and not self.tools:
            raise _FieldError("tool_choice", "tool_choice=required needs tools.")
        return self

    @property
    def chosen_names(self) -> list[str] | None:
        """Names of the functions that may be called; None: any of the tools."""
        if isinstance(self.tool_choice, NamedTool):
            return [self.tool_choice.function.name]
        if isinstance(self.tool_choice, AllowedToolChoice):
            return [tool.function.name for tool in self.tool_choice.allowed_tools.tools]
        return [] if self.tool_choice == "none" else None

    @property
    def must_call(self) -> bool:
        """Whether the answer must call a function."""
        choice = self.tool_choice
        if isinstance(choice, AllowedToolChoice):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool)


def _check_prompts(prompts: Any) -> Any:
    """Check prompts with the messages of Megatron's server."""
    if not isinstance(prompts, list) or not all(isinstance(prompt, str) for prompt in prompts):
        raise ValueError("prompts is not a list of strings")
    if not prompts:
        raise ValueError("prompts is empty")
    if len(prompts) > MAX_TEXTS:
        raise ValueError(f"Maximum number of prompts is {MAX_TEXTS}")
    return prompts


def _check_is_float(value: Any) -> Any:
    if not isinstance(value, float):
        raise ValueError("top_p must be a float from 0.0 to 1.0")
    return value


class ApiBody(Body):
    """``PUT /api``."""

    refused: ClassVar[Mapping[str, str]] = {
        "max_len": "is no longer used: give tokens_to_generate.",
        "sentences": "is no longer used: give prompts.",
    }
    prompts: Annotated[list[str], BeforeValidator(_check_prompts)]
    tokens_to_generate: int = Field(64, ge=0, le=_MAX_TOKENS)
    logprobs: bool = False
    top_n_logprobs: int = Field(0, ge=0, le=MAX_TOP)
    temperature: float = Field(1.0, gt=0, le=100)
    top_k: int = Field(0, ge=0, le=1000)
    top_p: Annotated[float, BeforeValidator(_check_is_float)] = Field(
        0.0, ge=0, le=1, description="With a decimal point: 1.0, not 1."
    )
    top_p_decay: float = Field(0.0, ge=0, le=1)
    top_p_bound: float = Field(0.0, ge=0, le=1)
    beam_width: int | None = Field(None, ge=1, le=128)
    length_penalty: float = Field(1.0, ge=-10, le=10)
    random_seed: int | None = Field(None, ge=0, le=MAX_SEED)
    stop_token: _TokenId | None = None
    add_BOS: bool = False  # noqa: N815
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        if not self.tokens_to_generate and not self.logprobs:
            raise _FieldError("", "tokens_to_generate=0 needs logprobs=true.")
        if self.top_n_logprobs and not self.logprobs:
            raise _FieldError("", "top_n_logprobs needs logprobs=true.")
        if self.top_p and self.top_k:
            raise _FieldError("top_p", "cannot set both top-k and top-p samplings.")
        ends_at_line = self.stop_on_eol or self.stop_on_double_eol
        if self.beam_width and (
            len(self.prompts) > 1
            or self.logprobs
            or ends_at_line
            or self.prevent_newline_after_colon
        ):
            raise _FieldError(
                "beam_width",
                "beam_width needs a single prompt, without logprobs, stop_on_eol, "
                "stop_on_double_eol and prevent_newline_after_colon.",
            )
        return self


def read_body(raw: bytes, model: type[AnyBody], max_ids: int = MAX_PARTS) -> AnyBody:
    """Parse a body of JSON and validate it as ``model``.

    Args:
        raw: JSON text.
        model: pydantic model of the interface.
        max_ids: most token ids in the prompts.

    Raises:
        RequestError: with status 400 for invalid JSON and for a wrong or unknown field; with
            413 for a body with more than ``MAX_PARTS`` parts, which would take long to parse.
    """
    # Counting brackets and commas bounds the number of objects without parsing the body.
    num_parts = max(raw.count(b"[") + raw.count(b"{"), raw.count(b'":'))
    if num_parts > MAX_PARTS or raw.count(b",") > MAX_PARTS + max_ids:
        message = (
            f"the body has more than {MAX_PARTS} objects, lists and fields, or more than "
            f"{max_ids} token ids."
        )
        raise RequestError(413, message)
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise _request_error(error, model) from None


def _request_error(error: ValidationError, model: type[Body]) -> RequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        why = first["msg"].removeprefix("Invalid JSON: ")
        return RequestError(400, f"the body is not valid JSON: {why}")
    if first["type"] == "model_type" and not first["loc"]:
        return RequestError(400, "the body must be a JSON object.")
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _FieldError):
        return RequestError(400, str(cause), cause.field)
    path = [part for part in first["loc"] if isinstance(part, str)]
    name = path[0] if path else ""
    field_info = model.model_fields.get(name)
    if model is ApiBody and isinstance(cause, ValueError):  # Megatron's messages
        return RequestError(400, str(cause), name)
    if first["type"] == "missing" and len(path) == 1:
        how = "argument required" if model is ApiBody else "is required."
        return RequestError(400, f"{name} {how}", name)
    # A description that begins with a small letter completes the sentence "field must be".
    if field_info is not None and (field_info.description or "")[:1].islower():
        return RequestError(400, f"{name} must be {field_info.description}.", name)
    if "content" in path:  # the content of a message
        return RequestError(400, f"{name}: content must be {_CONTENT}.", name)
    location = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Input ").removeprefix("Value error, ")
    message = message.replace("should", "must", 1)[:500]
    return RequestError(400, " ".join(f"{location}: {message}".split()) + ".", name)
