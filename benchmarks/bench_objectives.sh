#!/usr/bin/env bash
# Held-out figures of SFT, DPO and distillation of the quickstart's model, on a CPU.
#
#   benchmarks/bench_objectives.sh [FOLDER]
#
# About 8 minutes on two cores. Chats and pairs are halves of verses of the shipped book: the
# prompt is the first half, the answer the second, and the rejected answer its words shuffled.
# Prints the lines of validation that benchmarks/results/objectives-book.json quotes.
set -eu
cd "$(dirname "$0")/.."
folder=${1:-bench_objectives}
book=$folder/book
tokenizer="--tokenizer-model $book/data/tokenizer"
[ -d "$book" ] || mcore-train quickstart --output "$book"
python - "$folder" <<'END'
import json
import random
import re
import sys
from pathlib import Path

from mcore_train.quickstart.book import read_book

folder, draw = Path(sys.argv[1]), random.Random(7)
book = read_book(0)
halves = []
for text in (*book.train, *book.held_out):
    for verse in re.split(r"(?<=[.?!:;]) ", " ".join(text.split())):
        words = verse.split()
        if 10 <= len(words) <= 24:
            halves.append([" ".join(words[: len(words) // 2]), words[len(words) // 2 :]])
draw.shuffle(halves)
for name, part in (("train", halves[:4000]), ("held", halves[4000:4400])):
    chats, pairs = [], []
    for first, second in part:
        user, other = {"role": "user", "content": first}, draw.sample(second, len(second))
        chosen, rejected = (
            [{"role": "assistant", "content": " ".join(words)}] for words in (second, other)
        )
        chats.append({"messages": [user, *chosen]})
        pairs.append({"prompt": [user], "chosen": chosen, "rejected": rejected})
    for kind, records in (("chats", chats), ("pairs", pairs)):
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / f"{kind}_{name}.jsonl").write_text(lines)
END
# shellcheck disable=SC2086
for split in train held; do
  mcore-data prepare-chats --input "$folder/chats_$split.jsonl" --output-prefix "$folder/chats_$split" $tokenizer
  mcore-data prepare-preferences --input "$folder/pairs_$split.jsonl" --output-prefix "$folder/pairs_$split" $tokenizer
done
common="--seq-length 256 --micro-batch-size 8 --num-workers 0 --overwrite $tokenizer"
student="--num-layers 1 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 --ffn-hidden-size 192 --max-position-embeddings 256 --train-iters 300 --lr 6e-3 --lr-decay-style cosine --lr-warmup-fraction 0.12 --weight-decay 0.1 --adam-beta2 0.95 --train-data-path $book/data/train_text_document"
# shellcheck disable=SC2086
{
  mcore-train gpt $common --load "$book/checkpoint" --finetune --objective sft --train-data-path "$folder/chats_train" --train-iters 150 --lr 2e-3 --save "$folder/sft"
  mcore-train gpt $common --load "$folder/sft" --finetune --objective dpo --train-data-path "$folder/pairs_train" --train-iters 80 --lr 5e-4 --save "$folder/dpo"
  mcore-train gpt $common $student --save "$folder/alone"
  mcore-train gpt $common $student --objective distill --reference-model "$book/checkpoint" --distill-weight 0.9 --save "$folder/distilled"
} > "$folder/training.log" 2>&1
score() {
  echo "$1"
  # shellcheck disable=SC2086
  mcore-train gpt --seq-length 256 --micro-batch-size 8 --num-workers 0 $tokenizer --lr 1e-3 --train-iters 1000 \
    --eval-only --full-validation --eval-interval 1000 --eval-iters 1 --finetune --load "$@" 2>&1 | grep "validation loss"
}
for model in "$folder/alone" "$folder/distilled" "$book/checkpoint"; do
  score "$model" --train-data-path "$book/data/train_text_document" --valid-data-path "$book/data/held_out_text_document"
done
for model in "$book/checkpoint" "$folder/sft"; do
  score "$model" --objective sft --train-data-path "$folder/chats_train" --valid-data-path "$folder/chats_held"
done
for model in "$folder/sft" "$folder/dpo"; do
  score "$model" --objective dpo --reference-model "$folder/sft" --train-data-path "$folder/pairs_train" --valid-data-path "$folder/pairs_held"
done
