"""One step beside a trainer: rollouts, sleep, train, wake, new weights, and the proof they arrived.

Run it with the environment that `nox -s demo` made: `.nox/environments/torch/bin/python
examples/colocated_step.py`. The trainer here is a stand-in that nudges every weight; a real one is
in `syncline.engine.rl`.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file

from syncline.engine import LLM, SamplingParams, shipped_checkpoint
from syncline.graph_lifecycle import Tag


def main() -> None:
    """Print what each stage did."""
    checkpoint = shipped_checkpoint("novice")
    prompt = "00310000,00310001,00310002,"
    sampling = SamplingParams(n=4, max_tokens=27, temperature=1.0, seed=7)
    with LLM(checkpoint, num_kv_blocks=64) as llm:
        (rollouts,) = llm.generate(prompt, sampling, use_tqdm=False)
        for sample in rollouts.outputs:
            print(f"{sample.text}  logprob {sum(sample.logprobs):7.2f}")

        slept = llm.sleep(level=2)
        print(f"asleep: {sum(slept.num_bytes.values()):,} bytes given back")
        trained = {
            name: tensor.float() * 1.01
            for name, tensor in load_file(Path(checkpoint) / "model.safetensors").items()
        }

        llm.wake_up([Tag.WEIGHTS])  # The KV cache may sleep on while weights arrive.
        report = llm.update_weights(trained.items(), version=1)
        llm.wake_up([Tag.KV_CACHE])
        print(f"version {report.version}: {report.bytes_written:,} bytes, {report.coverage:.0%}")

        (again,) = llm.generate(prompt, sampling, use_tqdm=False)
        print(f"next rollouts carry version {again.outputs[0].weight_versions}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
