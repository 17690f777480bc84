#!/bin/sh
# From nothing to a chat with a model of your own making, on two CPU ranks and real text:  sh launch/demo.sh
#
# For:     any machine with Python 3.11 or newer. Installs into .venv (torch is large) and fetches no model and no data.
# Expect:  two runs. The first trains a tiny Llama from random weights on Lincoln's messages to Congress, the second
#          fine-tunes its export on a few dozen exchanges. Watch the held-out loss (eval loss): a uniform guess has
#          ln(260) = 5.56. The model stays a toy: what it says looks like English and means nothing.
# Stop:    Ctrl-C saves at the next step; the same line again goes on from there, and leaves alone what is finished.
set -eu
cd "$(dirname "$0")/.."
[ -f pyproject.toml ] || { echo "this script belongs into a checkout of mpdist, beside its pyproject.toml" >&2; exit 2; }

if [ ! -x .venv/bin/pip ]; then
    for python in python3 python3.14 python3.13 python3.12 python3.11 none; do
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    done
    [ "$python" != none ] || { echo "mpdist needs Python 3.11 or newer: install one, such as python3.12" >&2; exit 4; }
    "$python" -m venv .venv
fi
wanted=$(cat pyproject.toml constraints.txt | cksum)
if ! grep -qsxF "$wanted" .venv/demo-installed .venv/tests-installed; then
    echo "installing into .venv"
    .venv/bin/python -m pip install --quiet -e . -c constraints.txt
    echo "$wanted" >.venv/demo-installed
fi

for run in pretrain chat; do
    .venv/bin/mpdist launch "configs/demo_$run.yaml"
    [ -d "runs/demo-$run/export" ] || .venv/bin/mpdist export "runs/demo-$run" "runs/demo-$run/export"
done

sample='from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (kind.from_pretrained("runs/demo-chat/export") for kind in (AutoModelForCausalLM, AutoTokenizer))
chat = [{"role": "user", "content": "What does the message of 1864 say of the harvests?"}]
asked = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**asked, max_new_tokens=100, do_sample=False)[0]))'
printf '\nThe runs are in runs/demo-pretrain and runs/demo-chat; metrics.jsonl there has the losses.\n'
printf 'To load the export and generate from it, with .venv/bin/python:\n\n%s\n\nIt says:\n\n' "$sample"
HF_HUB_DISABLE_PROGRESS_BARS=1 .venv/bin/python -c "$sample"
