"""torchtitan's own Trainer on an exported plan against its own run in one process: losses of its Llama 3 debug model.

python benchmarks/torchtitan_parity.py            # needs torchtitan 0.3.0 in this environment

Trains three splits on two gloo processes: an uneven one, an interleaved one, and a table of no name. Weights come from
each parameter's name, so that every run starts alike; tokens come from a fixed seed.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import random
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

SEQUENCE, MICRO_BATCH, MICRO_BATCHES, STEPS = 64, 2, 4, 4
BLOCKS = 6  # of the debug model
CASES = ("uneven", "interleaved", "csv")


def write_case(case: str, folder: Path) -> None:
    """The exported files of a case."""
    from autopipe import export
    from tests.exports import interleaved, llama, one_f_one_b, plan_of
    from tests.synthetic import random_schedule

    cuts, schedule = {
        "uneven": ((3,), one_f_one_b(2, MICRO_BATCHES)),
        "interleaved": ((2, 5, 6), interleaved(2, 2, MICRO_BATCHES)),
        "csv": ((5,), random_schedule(random.Random(3), ranks=2, stages=2, micro_batches=MICRO_BATCHES, in_order=True)),
    }[case]
    plan = plan_of(llama(BLOCKS), cuts, schedule, micro_batch=MICRO_BATCH)
    for name, text in export.trainer("torchtitan").files(plan).items():
        (folder / name).write_text(text)


def _write_assets(folder: Path) -> None:
    """A tokenizer and a data set, so that the Trainer can be built: the losses are of other tokens."""
    from tokenizers import Tokenizer, models

    (folder / "tokenizer").mkdir(parents=True)
    (folder / "c4_test").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer" / "tokenizer.json"))
    (folder / "c4_test" / "data.json").write_text(json.dumps({"text": "a"}) + "\n")


def run(folder: Path, ranks: int, module: str) -> list[float]:
    """The losses of a run, from the rank that has them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    where = ["--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", str(ranks)]
    command = [sys.executable, "-m", "torch.distributed.run", *where, __file__, "--train", module]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    found = [json.loads((folder / f"losses{rank}.json").read_text()) for rank in range(ranks)]
    return next(losses for losses in found if min(losses) > 0)  # the other ranks have −1


def train(module: str) -> None:
    """One rank: torchtitan's Trainer with the configuration of a module."""
    import torch

    torch._utils._get_available_device_type = lambda: "cpu"  # torchtitan asks for an accelerator
    sys.path.insert(0, str(Path.cwd()))
    from importlib import import_module

    import torchtitan.components.metrics
    import torchtitan.trainer

    _accept_split_batches()
    _attend_on_a_cpu()
    nothing = SimpleNamespace(max_reserved_gib=0.0, max_reserved_pct=0.0)
    monitor = SimpleNamespace(device_name="cpu", get_peak_stats=lambda: nothing, reset_peak_stats=lambda: None)
    torchtitan.components.metrics.build_device_memory_monitor = lambda: monitor
    trainer = (base() if module == "-" else import_module(module).planned(base())).build()
    for part in trainer.model_parts:
        _fill(part)
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *rest, **more: losses.append(float(loss))
    data = _batches(trainer)
    for trainer.step in range(1, STEPS + 1):
        trainer.train_step(data)
    Path(f"losses{torch.distributed.get_rank()}.json").write_text(json.dumps(losses))
    trainer.close()
    torch.distributed.destroy_process_group()


def base() -> Any:
    """The debug model's configuration, small enough for a CPU."""
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.models.llama3 import config_registry, model_registry

    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    config.loss = CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(config.model_spec))
    config.training.seq_len, config.training.steps = SEQUENCE, STEPS
    config.training.local_batch_size = config.training.global_batch_size = MICRO_BATCH * MICRO_BATCHES
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.activation_checkpoint, config.compile.enable = None, False
    config.validator.enable = config.checkpoint.enable = False
    config.metrics.log_freq = 1
    return config


def _accept_split_batches() -> None:
    """torch before 2.14 has no step() for batches that are split already."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule, _PipelineScheduleRuntime

    if "arg_mbs" in inspect.signature(_PipelineScheduleRuntime.step).parameters:
        return

    def step(self: Any, *, arg_mbs: Any, kwarg_mbs: Any, target_mbs: Any, losses: Any, **options: Any) -> None:
        for stage in self._stages:
            stage.has_backward = self._has_backward
            stage.clear_runtime_states()
        self._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, **options)

    for kind in (_PipelineSchedule, _PipelineScheduleRuntime):
        kind.step = step


def _attend_on_a_cpu() -> None:
    """FlexAttention has no backward on a CPU: the same causal attention in its place."""
    import torch
    from torch.nn.attention.flex_attention import AuxOutput
    from torchtitan.models.common import attention

    def causal(q: Any, k: Any, v: Any, *, scale: Any, enable_gqa: bool, **ignored: Any) -> Any:
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa
        )
        return out, AuxOutput()

    attention.FlexAttention.compiled_flex_attn = staticmethod(causal)


def _fill(part: Any) -> None:
    import torch

    for name, parameter in part.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.02
        with torch.no_grad():
            own = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # no rank shares it
            own.copy_(values if parameter.dim() > 1 else 1 + values)


def _batches(trainer: Any) -> Any:
    """Batches as torchtitan's loader gives them, a micro-batch each where it pipelines."""
    import torch

    per_call = trainer.num_pipeline_parallel_microbatches
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(2048, (MICRO_BATCH * MICRO_BATCHES, SEQUENCE + 1), generator=generator)
        positions = torch.arange(SEQUENCE).repeat(len(tokens), 1)
        for rows, where in zip(tokens.chunk(per_call), positions.chunk(per_call), strict=True):
            yield {"input": rows[:, :-1], "positions": where}, rows[:, 1:].clone()


def main() -> None:
    """Compare all cases, or train one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", metavar="MODULE", help="train one rank (torchrun calls this)")
    module = parser.parse_args().train
    if module:
        return train(module)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_assets(folder / "tests" / "assets")
        alone = run(folder, 1, "-")
        print("one process ", *(f"{loss:.6f}" for loss in alone))
        right = True
        for case in CASES:
            write_case(case, folder)
            losses = run(folder, 2, "autopipe_torchtitan")
            differences = [abs(a - b) / b for a, b in zip(losses, alone, strict=True)]
            right &= all(difference <= 1e-5 for difference in differences)
            print(f"{case:12}", *(f"{loss:.6f}" for loss in losses), f"  differs by {max(differences):.1e}")
    sys.exit(not right)


if __name__ == "__main__":
    main()
