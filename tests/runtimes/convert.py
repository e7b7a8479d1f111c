"""llama.cpp's own converter, told how the one tokenizer of our real checkpoint splits text.

    python convert.py LLAMA_CPP FOLDER --outfile FILE --outtype TYPE

The converter knows tokenizers by a hash. ckpt-eltec's, byte-level BPE on single digits, splits text as SmolLM's does.
"""

from __future__ import annotations

import runpy
import sys
from typing import Any

_KNOWN_AS = "smollm"


def main() -> None:
    llama_cpp = sys.argv[1]
    sys.path[:0] = [llama_cpp, f"{llama_cpp}/gguf-py"]
    from conversion.base import TextModel

    known = TextModel.get_vocab_base_pre

    def known_or_ours(self: Any, tokenizer: Any) -> str:
        try:
            return str(known(self, tokenizer))
        except NotImplementedError:
            return _KNOWN_AS

    TextModel.get_vocab_base_pre = known_or_ours
    sys.argv[:2] = ["convert_hf_to_gguf.py"]
    runpy.run_path(f"{llama_cpp}/convert_hf_to_gguf.py", run_name="__main__")


if __name__ == "__main__":
    main()
