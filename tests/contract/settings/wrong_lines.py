"""Wrong command lines, each with what its one message has to say: what is wrong with the value, and what to do.

`{name}` is a file or folder that `write_files` makes, or one that `write_mistakes` made. Words without a command are
flags behind those of a command line that works, and go before them.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path

NUMBERS = (
    ("--n-samples-per-prompt 1000000000", "--n-samples-per-prompt: got 1000000000", "at most 1000000"),
    ("--rollout-batch-size 100000000000000000000", "--rollout-batch-size: got 1", "at most 1000000"),
    ("--rollout-batch-size 1000000 --n-samples-per-prompt 1000", "= 1000000000 executions", "lower one of the two"),
    ("--rollout-batch-size -4", "--rollout-batch-size: got -4", "at least 1"),
    ("--rollout-batch-size 2.5", "--rollout-batch-size: got '2.5', expected int"),
    ("--rollout-batch-size 1_0", "--rollout-batch-size: got '1_0', expected int"),
    ("--n-samples-per-prompt -3", "--n-samples-per-prompt: got -3", "at least 1"),
    ("--num-rollout 99999999999", "--num-rollout: got 99999999999", "at most 1000000000"),
    ("--rollout-max-context-len -1", "--rollout-max-context-len: got -1", "at least 2"),
    ("--rollout-temperature inf", "--rollout-temperature: got inf", "not a finite number"),
    ("--rollout-temperature 0", "rollout_temperature 0.0: greedy", "give a value > 0"),
    ("--rollout-top-p 1.5", "--rollout-top-p: got 1.5", "at most 1"),
    ("--rollout-top-k -2", "--rollout-top-k: got -2", "at least -1"),
    ("--rollout-stop-token-ids -5", "--rollout-stop-token-ids: got -5", "at least 0"),
    ("--seed -1", "--seed: got -1", "at least 0"),
    ("--rollout-seed 1e3", "--rollout-seed: got '1e3', expected int"),
    ("--lr inf", "--lr: got inf", "not a finite number"),
    ("--lr nan", "--lr: got nan", "not a finite number"),
    ("--lr 1e400", "--lr: got inf", "not a finite number"),
    ("--lr 1000", "--lr: got 1000.0", "at most 100"),
    ("--lr=", "--lr: got '', expected float"),
    ("--lr", "--lr: got no value", "write --lr <float>"),
    ("--min-lr -1", "--min-lr: got -1.0", "at least 0"),
    ("--adam-beta1 1", "--adam-beta1: got 1.0", "< 1"),
    ("--clip-grad nan", "--clip-grad: got nan", "not a finite number"),
    ("--eps-clip 1.1 --policy-loss cispo", "--eps-clip: got 1.1", "at most 1"),
    ("--kl-coef 1e9", "--kl-coef: got 1000000000.0", "at most 1000"),
    ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size: got 0", "at least 1"),
    ("--moe-layer-freq 1e999", "--moe-layer-freq: got '1e999', expected int or a JSON list"),
    ("--sglang-mem-fraction-static 7", "--sglang-mem-fraction-static: got 7.0", "< 1"),
    ("--sglang-context-length -5", "--sglang-context-length: got -5", "at least 1"),
    ("--sglang-context-length 4kk", "--sglang-context-length: got '4kk', expected a whole number, such as 4096 or 4k"),
    ("--sglang-max-running-requests 0", "--sglang-max-running-requests: got 0", "at least 1"),
    ("--router-port 65536", "--router-port: got 65536", "at most 65535"),
    ("--router-cache-threshold 3", "--router-cache-threshold: got 3.0", "at most 1"),
    ("--request-timeout-s 1e-9", "--request-timeout-s: got 1e-09", "at least 0.01"),
    ("--weight-sync-timeout-s 1e12", "--weight-sync-timeout-s: got 1000000000000.0", "at most 2592000"),
    ("--distributed-timeout-minutes 0", "--distributed-timeout-minutes: got 0", "at least 1"),
    ("--reward-num-workers 0", "--reward-num-workers: got 0", "at least 1"),
    ("--rollout-num-workers -1", "--rollout-num-workers: got -1", "at least 0"),
    ("--start-rollout-id -1", "--start-rollout-id: got -1", "at least 0"),
    ("--save s --save-interval 0", "--save-interval: got 0", "at least 1"),
    ("--load-debug-rollout-data-subsample 2", "--load-debug-rollout-data-subsample: got 2.0", "at most 1"),
    ("--log-ratio-limit 1000", "--log-ratio-limit: got 1000.0", "at most 88"),
)
"""Numbers that no run could mean."""

WORDS = (
    ("--colocate --no-colocate", "got --colocate and --no-colocate", "keep one", "--override"),
    ("--lr 1e-5 --lr 1e-6", "got --lr 1e-5 and --lr 1e-6", "keep one"),
    ("--lr 1e-5 --lr=1e-6", "got --lr 1e-5 and --lr 1e-6", "keep one"),
    ("--rotary-base 1000000 --rotary-base 5000000", "--rotary-base 1000000 and --rotary-base 5000000", "keep one"),
    ("--mismatch-limit 1 --logprob-gap-limit 2", "--mismatch-limit 1 and --logprob-gap-limit 2", "keep one"),
    ("--sglang-log-level info --sglang-log-level debug", "--sglang-log-level info and --sglang-log-level debug"),
    ("--router-policy random --router-policy cache_aware", "--router-policy random and --router-policy cache_aware"),
    ("--sglang-api-key aaa --sglang-api-key bbb", "got two values for --sglang-api-key", "keep one"),
    ("--prompt-data {data} --prompt-data other.jsonl", "--prompt-data other.jsonl", "keep one"),
    ("--apply-chat-template false", "got a value 'false', but it is a switch", "write --no-apply-chat-template"),
    ("--use-tis true", "--use-tis: got a value 'true', but it is a switch", "write --use-tis alone"),
    ("--rollout-shuffle=no", "--rollout-shuffle: got a value 'no'", "write --no-rollout-shuffle"),
    ("--bf16 0", "--bf16: got a value '0', but it is a switch", "write --no-bf16"),
    ("--advantage-estimator mamba", "there is no such advantage estimator", "known are"),
    ("--advantage-estimator grop", "did you mean grpo?"),
    ("--lr-decay-style cosin", "did you mean 'cosine'?"),
    ("--loss-type sfx", "--loss-type: got 'sfx', which is not one of"),
    ("--update-weight-transport pigeon", "there is no such weight transport", "known are"),
    ("--device tpu", "--device: got 'tpu', which is not one of auto, cpu, cuda"),
    ("--train-env-vars [1]", "--train-env-vars: got '[1]', expected a JSON object"),
    ('--train-env-vars {{"A":1}}', "got 1 of A, which is not a string", 'write "A": "1"'),
    ('--train-env-vars {{"A":"1","A":"2"}}', "the key 'A' occurs twice", "keep one"),
    ('--train-env-vars {{"A=B":"1"}}', "got train_env_vars with 'A=B'", "correct it"),
    ("--sglang-nnodes 2", "slime sets itself", "an engine spans the hosts"),
    ("---lr 3", "got unknown flag ---lr; did you mean --lr?"),
    ("--lerning-rate 3", "got unknown flag --lerning-rate"),
    ("-lr 3", "got '-lr 3', which belongs to no flag", "--name value"),
    ("--help rollout", "got --help rollout", "topics are slime, megatron"),
    ("--save-hf out/{{step}}", "save_hf out/{{step}}", "only {{rollout_id}} is known"),
    ("--freeze-params-name-list (", "not a regular expression", "correct it"),
    ("--custom-rm-path nowhere:reward", "--custom-rm-path", "nowhere"),
)
"""Words that a launch script has by mistake."""

LONG = "x" * 5000
PLACES = (
    ("--hf-checkpoint {data}", "config.json does not exist", "give a local folder in HF format"),
    ("--hf-checkpoint {binary_config}", "config.json is not text", "fetched again"),
    ("--hf-checkpoint {broken_config}", "config.json is not JSON", "correct it, or give another"),
    ("--hf-checkpoint {mamba}", "got a checkpoint of model_type mamba", "known are"),
    ("--prompt-data nowhere:nope", "there is no such data scheme", "known are rg"),
    ("--eval-prompt-data held nowhere.jsonl", "evaluation data held nowhere.jsonl", "does not exist"),
    ("--eval-interval 1 --eval-prompt-data a {data} b", "eval_prompt_data a", "give pairs: NAME FILE"),
    ("--eval-interval 1 --eval-prompt-data a nowhere.jsonl", "evaluation data a nowhere.jsonl", "does not exist"),
    ("--eval-config nowhere.yaml", "--eval-config nowhere.yaml does not exist", "give a YAML file"),
    ("--run-dir /proc/run", "run_dir /proc/run", "nothing can be written in /proc", "name another --run-dir"),
    ("--prompt-data {pipe}", "which is a pipe or a device", "a .jsonl or .parquet file"),
    ("--prompt-data " + LONG, "xxx cannot be used (File name too long)", "name another"),
    (
        "--eval-interval 1 --eval-prompt-data a " + LONG,
        "xxx cannot be used (File name too long)",
        "name another",
    ),
    ("--hf-checkpoint " + LONG, "cannot be used (File name too long)", "name another"),
    ("--load " + LONG, "cannot be used (File name too long)", "name another"),
    ("--kl-coef 1 --ref-load " + LONG, "cannot be used (File name too long)", "name another"),
    ("--run-dir /dev/null/run", "lies below the file /dev/null", "name another --run-dir"),
    ("--run-dir {data}", "because {data} is a file", "name another --run-dir"),
    ("--run-dir /", "run_dir /, which is the root of the file system", "name another --run-dir"),
    ("--save /", "got --save /, which is the root of the file system", "name another folder"),
    ("--run-dir " + "x" * 300, "File name too long", "name another --run-dir"),
    ("--ray-address ray://head:10001", "an address of Ray Client", "HOST:PORT"),
    ("--ray-address head", "ray_address head, which is not HOST:PORT", "`ray start --head`"),
    ("--ray-address head:port", "ray_address head:port, which is not HOST:PORT"),
    ("--ray-address 127.0.0.1:1", "where no Ray cluster can be reached", "Connection refused", "HOST:PORT"),
    ("--ray-address nowhere.invalid:6379", "where no Ray cluster can be reached", "`ray start --head`"),
)
"""Files, folders and addresses that are not what they should be."""

FILES = (
    ("--custom-config-path nowhere.yaml", "does not exist", "give a YAML file"),
    ("--custom-config-path {folder}", "is a folder", "name a YAML file in it"),
    ("--custom-config-path {binary}", "is not text", "give a YAML file"),
    ("--eval-interval 1 --eval-config {binary}", "--eval-config", "is not text"),
    ("--sglang-config {binary}", "--sglang-config", "is not text"),
    ("--megatron-config-path {binary}", "--megatron-config-path", "is not text"),
    ("--custom-config-path {no_yaml}", "is not YAML", "correct it"),
    ("--custom-config-path {list}", "not a mapping", "write `name: value` lines"),
    ("--custom-config-path {twice}", "the key 'lr' occurs twice (lines 1 and 3)", "keep one"),
    ("--custom-config-path {spelled_twice}", "got rollout-seed and rollout_seed, which are one setting", "keep one"),
    ("--eval-interval 1 --eval-config {eval_twice}", "the key 'path' occurs twice", "keep one"),
    ("--sglang-config {topology_twice}", "the key 'num_gpus' occurs twice", "keep one"),
    ("--megatron-config-path {roles_twice}", "the key 'lr' occurs twice", "keep one"),
    ("--custom-config-path {infinite}", "lr: got inf, which is not a finite number"),
    ("--custom-config-path {variables}", "train_env_vars: got 1 of A, which is not a string", 'write "A": "1"'),
    ("--custom-config-path {unknown}", "got rolout_batch_size: 4", "did you mean rollout_batch_size?"),
    ("--custom-config-path {wrong_kinds}", "advantage_estimator: got ['grpo'], expected str"),
    ("--custom-config-path {zero}", "which holds a character of code 0", "leave that out"),
    ("--custom-config-path {twice} --lr 1", "occurs twice"),
    ("--lr 1 --custom-config-path {other_rate}", "got 0.5 here and 1.0 on the command line", "give it in one place"),
    ("--custom-config-path {bomb}", "aliases expand to more than 100000 values (line 5)", "write the values out"),
    ("--custom-config-path {itself}", "an alias refers to a value that contains it (line 1)", "write the values out"),
    ("--custom-config-path {pipe}", "pipe", "it is a pipe or a device, not a file", "give a YAML file"),
    ("--custom-config-path /dev/zero", "it is a pipe or a device, not a file", "give a YAML file"),
    ("--eval-interval 1 --eval-config {pipe}", "it is a pipe or a device, not a file", "give a YAML file"),
    ("--sglang-config {pipe}", "it is a pipe or a device, not a file", "give a YAML file"),
    ("--megatron-config-path {pipe}", "it is a pipe or a device, not a file", "give a YAML file"),
    ("--router-api-key @{pipe}", "it is a pipe or a device, not a file", "name the file of the secret"),
    ("--router-api-key @/dev/zero", "it is a pipe or a device, not a file", "name the file of the secret"),
    ("--router-api-key @{novel}", "which cannot be read: it has more than 65536 bytes", "name the file of the secret"),
    ("--router-api-key @{two_lines}", "characters that an HTTP header does not carry", "no space at the ends"),
    ("--router-api-key @{marked}", "characters that an HTTP header does not carry", "no space at the ends"),
    ("--router-api-key @{long_key}", "a key with 5000 characters", "at most 4096"),
    ("--sglang-api-key schlüssel", "characters that an HTTP header does not carry", "no space at the ends"),
    ("--eval-interval 1 --eval-config {no_path}", "eval.datasets[0] has no name or no path", "give both"),
    ("--eval-interval 1 --eval-config {no_entry}", "eval.datasets.a: got 3, which is not a mapping", "path: FILE"),
    ("--eval-interval 1 --eval-config {hot}", "temperature: got -1.0", "at least 0"),
    ("--sglang-config {greedy}", "overrides.mem_fraction_static: got 7.0", "< 1"),
    ("--sglang-config {list}", "which is not a mapping", "known keys are sglang"),
)
"""YAML files of a user."""

COMMANDS = (
    ("slime report nowhere", "got no step in nowhere/metrics.jsonl", "name the folder of a run"),
    ("slime report {bad_metrics}", "got line 2 of", "does not hold metrics", "take it out"),
    ("slime report {endless_step}", "got line 1 of", "whose step is not a number", "take it out"),
    ("slime trace nowhere", "holds no traces", "name the folder of a run"),
    ("slime trace {traced} --out /proc/x", "/proc/x cannot be used", "name another"),
    ("slime samples nowhere", "holds no samples"),
    ("slime rerun " + LONG, "cannot be used (File name too long)", "name another"),
    ("slime rerun nowhere", "holds no run.json", "name the folder of a run"),
    ("slime rerun {bad_metrics}", "run.json, which cannot be read as JSON", "restore it from a copy"),
    ("slime rerun {no_starts}", "holds no list of starts", "restore it"),
    ("slime rerun {no_command}", "does not say the command of start 0", "start the run by its command line"),
    ("slime recipe tiny-demo", "got the recipe tiny-demo", "there are", "demo"),
    ("slime serve --port 70000", "got '70000'", "at most 65535"),
    ("slime serve nowhere.yaml", "nowhere.yaml does not exist", "give a YAML file"),
    ("slime serve {binary}", "is not text", "give a YAML file"),
    (
        "slime weights-agent --engine x --disk-dir d --local-dir l",
        "--engine x, which does not begin with http://",
        "http://HOST:PORT",
    ),
    ("slime weights-agent --engine http://x --disk-dir d --local-dir l --limit-s nan", "--limit-s nan", "finite"),
    ("slime doctor --device tpu", "invalid choice: 'tpu'", "auto"),
    ("slime doctor --template nowhere", "nowhere, which is not a folder"),
    ("slime samples nowhere --step 1 --step 2", "got 1 and 2", "keep one"),
    ("slime trian", "invalid choice: 'trian'", "'train'"),
    ("slime tokenizer nowhere", "got nowhere, which is not a folder", "give a released folder of Kimi-K2"),
    ("slime train-async --colocate", "drop --colocate or use train.py"),
)
"""The other commands."""

LINES = (*NUMBERS, *WORDS, *PLACES, *FILES, *COMMANDS)


def write_files(folder: Path) -> dict[str, str]:
    """Writes what the lines name into `folder`; returns name -> path."""
    texts: dict[str, str | bytes] = {
        "binary.yaml": b"\xff\xfe\x00lr: 1\n",
        "no_yaml.yaml": "lr: [1\n",
        "list.yaml": "- lr\n",
        "twice.yaml": "lr: 1\nclip_grad: 1\nlr: 2\n",
        "spelled_twice.yaml": "rollout-seed: 1\nrollout_seed: 2\n",
        "eval_twice.yaml": "eval:\n  datasets:\n    - {name: a, path: b, path: c}\n",
        "topology_twice.yaml": "sglang:\n  - {name: a, server_groups: [{num_gpus: 1, num_gpus: 2}]}\n",
        "roles_twice.yaml": "megatron:\n  - {role: critic, overrides: {lr: 1, lr: 2}}\n",
        "infinite.yaml": "lr: .inf\n",
        "variables.yaml": "train_env_vars: {A: 1}\n",
        "unknown.yaml": "rolout_batch_size: 4\n",
        "wrong_kinds.yaml": "advantage_estimator: [grpo]\n",
        "zero.yaml": 'wandb_project: "a\\0b"\n',
        "other_rate.yaml": "lr: 0.5\n",
        "no_path.yaml": "eval: {datasets: [{name: a}]}\n",
        "no_entry.yaml": "eval: {datasets: {a: 3}}\n",
        "hot.yaml": "eval: {datasets: [{name: a, path: b, temperature: -1}]}\n",
        "greedy.yaml": "sglang: [{name: a, server_groups: [{num_gpus: 1, overrides: {mem_fraction_static: 7}}]}]\n",
        "bomb.yaml": "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
        + "".join(f"{new}: &{new} [{','.join([f'*{old}'] * 10)}]\n" for old, new in itertools.pairwise("abcdefghi")),
        "itself.yaml": "custom_a: &a [*a]\n",
        "novel": "k" * 100_000,
        "two_lines": "a\nb",
        "marked": b"\xef\xbb\xbfkey",
        "long_key": "k" * 5000,
        "binary_config/config.json": b"\xff\xfe\x00",
        "broken_config/config.json": "{",
        "mamba/config.json": '{"model_type": "mamba"}',
        "bad_metrics/metrics.jsonl": '{"train/step": 0}\n["train/loss"]\n',
        "bad_metrics/run.json": '{"starts": [',
        "endless_step/metrics.jsonl": '{"train/step": Infinity}\n',
        "traced/traces/driver.json": "[\n",
        "no_starts/run.json": '{"starts": {}}',
        "no_command/run.json": '{"starts": [{"command": "slime train", "cwd": "/"}]}',
    }
    paths = {"folder": str(folder), "pipe": str(folder / "pipe")}
    os.mkfifo(paths["pipe"])
    for name, content in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        first = name.partition("/")[0]
        paths[first.removesuffix(".yaml")] = str(folder / first)
    return paths
