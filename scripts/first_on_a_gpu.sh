#!/usr/bin/env bash
# The first ten minutes on a GPU: preservation on the device, waits for it, speed of every kind of step, rivals in one run,
# evaluation, and the peak of an export. On a processor, to try the script itself: SMALL=1 scripts/first_on_a_gpu.sh
set -uo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/first-on-a-gpu}
if [ -n "${SMALL:-}" ]; then
    SHAPE="--layers 2 --hidden 256 --vocabulary 8192" LENGTH=128 STEPS=6 BATCH=4 BENCHMARK=tiny FLASH=
else
    SHAPE="" LENGTH=2048 STEPS=30 BATCH=4 BENCHMARK=gpu FLASH=train.attention=flash_attention_2
fi
mkdir -p "$OUT"
nvidia-smi --query-gpu=name,memory.total --format=csv,noheader 2> /dev/null || echo "no GPU: this tries the script alone"
[ -d "$OUT/base" ] || python -m scripts.random_base "$OUT" $SHAPE

cat > "$OUT/run.yaml" <<YAML
output_dir: $OUT/eager
model: {base: $OUT/base, dtype: bfloat16}
method: {variant: route, expansion: {ratio: 0.125}}
corpus: {sequence_length: $LENGTH, sources: [{name: korean, path: $OUT/text/korean-train.txt, language: ko}]}
train:
  {max_steps: $STEPS, global_batch_size: $((2 * BATCH)), micro_batch_size: $BATCH, warmup_steps: 2, log_every_steps: $((STEPS / 3)),
   mixed_precision: bf16, lr: 1.0e-4}
evaluation:
  perplexity:
    - {name: english, path: $OUT/text/english-valid.txt, language: en, role: retention, max_documents: 20}
    - {name: korean, path: $OUT/text/korean-valid.txt, language: ko, role: acquisition, max_documents: 20}
YAML

failed=0
step() { echo; echo "== $1"; shift; "$@" || { echo "FAILED ($?): $*"; failed=1; }; }
scale() { python -m scale_cli "$@"; }
speed() { python - "$1" <<'PY'
import json, sys
last = json.loads(open(f"{sys.argv[1]}/metrics.jsonl").read().splitlines()[-1])
print({key: last[key] for key in ("tokens_per_s", "mfu", "peak_memory_bytes", "data_wait_s", "loss") if key in last})
PY
}
# A way of training: a name, and what the config has besides.
train() {
    local run="$OUT/$1"; shift
    scale upscale "$OUT/run.yaml" "output_dir=$run" "$@" && scale train "$OUT/run.yaml" "output_dir=$run" "$@" && speed "$run"
}

step "the plan" scale plan "$OUT/run.yaml"
step "eager; upscale proves that base logits are the same bits on this device" train eager
step "compiled" train compiled train.compile=true
[ -z "$FLASH" ] || step "flash attention" train flash "$FLASH"
step "isolated documents" train isolated corpus.isolate_documents=true
waits() {
    scale upscale "$OUT/run.yaml" "output_dir=$OUT/waits" && python - "$OUT" <<'PY'
import sys
import torch
from scale_cli.cli import main
if torch.cuda.is_available():
    torch.cuda.set_sync_debug_mode("warn")
sys.argv = ["scale", "train", f"{sys.argv[1]}/run.yaml", f"output_dir={sys.argv[1]}/waits"]
main()
PY
}
step "waits for the device between two records of the log (each warning names its line)" waits
step "evaluate" scale evaluate "$OUT/run.yaml"
step "export, and its peak" python - "$OUT" <<'PY'
import resource, sys
import torch
from scale_cli.cli import main
sys.argv = ["scale", "export", f"{sys.argv[1]}/run.yaml"]
try:
    main()
finally:
    device = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(f"peak: host {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB, device {device / 2**30:.2f} GiB")
PY
step "rivals in one run" python -m scripts.benchmark --shape "$BENCHMARK" --rounds 3 --output "$OUT/benchmark" \
    --methods "full,hf full,hf lora,preserve r=0.125"
exit $failed
