"""Answers of plain models, computed by whatever transformers this is run with: no test, and nothing of ours in it.

    python answer.py FOLDER ...

Every folder holds a model, its tokenizer and `questions.json`: token ids and texts. `answers.safetensors` is put there:
the logits of those ids, the ids of those texts, one after another, and the ids that end a text; where there is code
beside the weights, also its logits, and what it generates.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.no_grad()
def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        questions = json.loads((folder / "questions.json").read_text())
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", trust_remote_code=False
        ).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        ids = [number for text in questions["texts"] for number in tokenizer(text).input_ids]
        logits = model(input_ids=torch.tensor(questions["ids"]), use_cache=False).logits
        answers = {
            "logits": logits,
            "ids": torch.tensor(ids),
            "ends": torch.tensor(model.generation_config.eos_token_id),
        }
        if "auto_map" in json.loads((folder / "config.json").read_text()):
            routed = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", trust_remote_code=True
            ).eval()
            ids_BT = torch.tensor(questions["ids"])
            answers["routed"] = routed(input_ids=ids_BT, use_cache=False).logits
            answers["generated"] = routed.generate(
                ids_BT[:, :30], max_new_tokens=8, do_sample=False, pad_token_id=0
            )
        save_file(answers, folder / "answers.safetensors")
    print(transformers.__version__)


if __name__ == "__main__":
    main()
