"""Trains a model in pipeline stages, with nothing but torch and the model's file.

llama.py for torch 2.13, by autopipe 0.1.0
plan <digest>
2 stages on 2 ranks, 1F1B, 4 micro-batches of 2, global batch 8
predicted: 192 ms a step

    torchrun --nproc-per-node 2 train_pipeline.py            # train
    torchrun --nproc-per-node 2 train_pipeline.py --check    # compare with one process

The model is built whole on every rank and pruned in place: a stage keeps its layers under the model's own names, and
runs the model's own forward from the call of its first layer to the call of the next stage's first layer.
"""

import argparse
import copy
import hashlib
import importlib.util
import inspect
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

HERE = Path(__file__).parent
MODEL = HERE / "models/llama.py"
BUILDER = "build_model"
MODEL_SHA256 = "abababababababababababababababababababababababababababababababab"
SCHEDULE = HERE / "schedule.csv"  # a row a rank; 1F0 is the forward of stage 1 for micro-batch 0
MICRO_BATCH, MICRO_BATCHES = 2, 4
RANKS, REPLICAS = 2, 1  # of one pipeline; pipelines that share the batch
RANK_OF = [0, 1]  # each stage's rank
STAGES = [
    ["model.embed_tokens", "model.layers.0", "model.layers.1"],
    ["model.layers.2", "model.layers.3", "model.layers.4", "model.layers.5", "model.norm", "lm_head"],
]
BOUNDARIES = [((2, 65536), torch.float32)]  # what each stage but the last sends, for one micro-batch
RECOMPUTE = set()
OPTIMIZER = torch.optim.AdamW
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-6}


class Leave(Exception):
    """The model's forward has come to the next stage's first layer."""

    def __init__(self, value):
        self.value = value


class Stage(nn.Module):
    """Some layers of the model. ``forward`` gives what the next stage receives; on the last stage, the loss."""

    def __init__(self, model, loss_fn, index):
        super().__init__()
        self.model, self.loss_fn = model, loss_fn
        self.received = []  # what the stage before sent
        for number, layers in enumerate(STAGES):
            if number != index:
                for layer in layers:
                    hollow(model.get_submodule(layer), self.earlier if number < index else self.never)
        if index > 0:
            first = model.get_submodule(STAGES[index][0])
            first.register_forward_pre_hook(self.enter, with_kwargs=True)
        if index < len(STAGES) - 1:
            model.get_submodule(STAGES[index + 1][0]).forward = leave
        for layer in RECOMPUTE.intersection(STAGES[index]):
            recompute(model.get_submodule(layer))

    def forward(self, *received, batch):
        """The model's own forward on one micro-batch, ``(inputs, target, share)``, from what was received."""
        self.received[:] = received
        inputs, target, share = batch
        try:
            output = self.model(**inputs) if isinstance(inputs, dict) else self.model(*inputs)
        except Leave as end:  # torch detaches what a stage sends in place, which a view forbids
            return end.value.clone() if end.value._is_view() else end.value
        finally:
            self.received.clear()
        return weighed(self.loss_fn, output, target, float(share)).sum(dtype=torch.float64)

    def enter(self, module, args, kwargs):
        """The first layer's first argument is what was received."""
        if args:
            return (self.received[0], *args[1:]), kwargs
        return args, kwargs | {next(iter(inspect.signature(module.forward).parameters)): self.received[0]}

    def earlier(self, *args, **kwargs):
        """A layer of an earlier stage: its result is not used, but has the right shape."""
        return self.received[0]

    def never(self, *args, **kwargs):
        """A layer behind the next stage's first: the forward leaves before it."""
        raise RuntimeError("a layer of a later stage was called before that stage's first layer")


def hollow(layer, forward):
    """Take away a layer's parameters, buffers and children; leave the object, its attributes and its place."""
    for table in (layer._parameters, layer._buffers, layer._modules):
        table.clear()
    layer.forward = forward


def leave(*args, **kwargs):
    """The next stage's first layer: its first argument is what goes there."""
    raise Leave(args[0] if args else next(iter(kwargs.values())))


def recompute(layer):
    """Keep only the layer's inputs; its backward runs its forward again."""
    forward = layer.forward
    layer.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


def stages_of(name):
    """The stages whose layers hold a parameter."""
    return {s for s, layers in enumerate(STAGES) for layer in layers if name.startswith(f"{layer}.")}


def tied(model):
    """Names of parameters that several ranks hold, with the ranks. Exits for a parameter that no stage holds."""
    holders, names = {}, {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not stages_of(name):
            sys.exit(f"parameter {name} is in no layer of the plan: plan the model again")
        holders.setdefault(parameter, set()).update(RANK_OF[stage] for stage in stages_of(name))
        names.setdefault(parameter, []).append(name)
    return {tuple(names[p]): sorted(ranks) for p, ranks in holders.items() if len(ranks) > 1}


def prune(model, loss_fn, rank):
    """This rank's stages. Several on one rank share their parameters, tied ones too."""
    mine = [stage for stage, where in enumerate(RANK_OF) if where == rank]
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copies = [copy.deepcopy(model, dict(shared)) for _ in mine[1:]]
    return {index: Stage(part, loss_fn, index) for index, part in zip(mine, [model, *copies], strict=True)}


class Pipeline:
    """This rank's stages on torch's pipeline runtime."""

    def __init__(self, model, loss_fn, device):
        self.mesh = init_device_mesh(device.type, (REPLICAS, RANKS), mesh_dim_names=("replica", "rank"))
        self.device, group, rank = device, self.mesh.get_group("rank"), self.mesh.get_local_rank("rank")
        ties = tied(model)
        self.parts = {index: part.to(device) for index, part in prune(model, loss_fn, rank).items()}
        self.ties = [(names, self.tie_group(ranks)) for names, ranks in ties.items()]
        stages = [self.torch_stage(index, part, group) for index, part in self.parts.items()]
        whole = {"loss_fn": lambda loss, _: loss, "scale_grads": False}  # the stage has weighed it
        self.schedule = _PipelineScheduleRuntime(stages, MICRO_BATCHES, **whole)
        self.schedule._load_csv(str(SCHEDULE))

    def torch_stage(self, index, part, group):
        """torch's stage, told what crosses its boundaries: nothing is guessed from uninitialised memory."""
        metas = [torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for shape, dtype in BOUNDARIES]
        metas.append(torch.empty((), dtype=torch.float64, device="meta", requires_grad=True))  # the loss
        return PipelineStage(
            submodule=part,
            stage_index=index,
            num_stages=len(STAGES),
            device=self.device,
            input_args=(metas[index - 1],) if index else (),
            output_args=(metas[index],),
            group=group,
        )

    def tie_group(self, ranks):
        """The group of these ranks in this rank's pipeline; every rank makes every group."""
        groups = [dist.new_group([row[rank] for rank in ranks]) for row in self.mesh.mesh.tolist()]
        return groups[self.mesh.get_local_rank("replica")] if self.mesh.get_local_rank("rank") in ranks else None

    def step(self, inputs, target):
        """Forward and backward of one global batch; gradients are left in ``.grad``. Its loss, on every rank."""
        first = self.mesh.get_local_rank("replica") * MICRO_BATCHES
        mine = rows((inputs, target), first * MICRO_BATCH, (first + MICRO_BATCHES) * MICRO_BATCH)
        parts = shares(inputs, target)[first : first + MICRO_BATCHES]
        losses, batch = [], (*to_device(mine, self.device), parts)
        ignored = torch.zeros(MICRO_BATCHES)  # torch wants targets where there is a loss; the stage has its own
        self.schedule.step(batch=batch, target=ignored, losses=losses, return_outputs=False)
        named = self.named_parameters()
        for names, group in self.ties:
            if group is not None:
                parameter = next(named[name] for name in names if name in named)
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad, group=group)
        loss = sum((loss.detach() for loss in losses), torch.zeros((), dtype=torch.float64, device=self.device))
        if REPLICAS > 1:
            for value in (loss, *(p.grad for p in self.parameters() if p.grad is not None)):
                dist.all_reduce(value, group=self.mesh.get_group("replica"))
        dist.broadcast(loss, RANK_OF[-1])
        return loss

    def named_parameters(self):
        """This rank's parameters under the model's own names."""
        parts = self.parts.values()
        return {name: p for part in parts for name, p in part.model.named_parameters(remove_duplicate=False)}

    def parameters(self):
        """This rank's parameters, each once: for an optimizer."""
        return list(dict.fromkeys(p for p in self.named_parameters().values() if p.requires_grad))

    def state_dict(self):
        """This rank's part of the model's state_dict, under the model's own names."""
        return {name: value for part in self.parts.values() for name, value in part.model.state_dict().items()}


def shares(inputs, target):
    """What the loss of each micro-batch of all replicas counts for in the batch's: all the same."""
    return torch.full((MICRO_BATCHES * REPLICAS,), 1 / (MICRO_BATCHES * REPLICAS), dtype=torch.float64)


def weighed(loss_fn, output, target, share):
    """A micro-batch's part of the batch's loss."""
    return loss_fn(output, target) * share


def rows(value, start, stop):
    """Rows of every tensor in a nested value."""
    return tree_map(lambda leaf: leaf[start:stop] if isinstance(leaf, torch.Tensor) else leaf, value)


def to_device(value, device):
    """A nested value with its tensors on the device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, value)


def load(path):
    """The model's file as a module, if it is the one that was planned."""
    if MODEL_SHA256 and hashlib.sha256(path.read_bytes()).hexdigest() != MODEL_SHA256:
        sys.exit(f"{path} has changed since it was planned: plan it again")
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location("model_file", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check(pipeline, reference, workload, batch):
    """Losses, gradients and names against one process. 0 when they agree."""
    inputs, target = batch
    loss = pipeline.step(inputs, target)
    expected = 0.0
    for number, share in enumerate(shares(inputs, target).tolist()):
        piece = rows((inputs, target), number * MICRO_BATCH, (number + 1) * MICRO_BATCH)
        some, its_target = to_device(piece, pipeline.device)
        output = reference(**some) if isinstance(some, dict) else reference(*some)
        part = weighed(workload.loss_fn, output, its_target, share)
        part.backward()
        expected += part.item()
    worst, limit = differences(pipeline, reference), max(TOLERANCE.get(p.dtype, 2e-2) for p in reference.parameters())
    found = torch.tensor([worst, abs(loss.item() - expected) / (abs(expected) or 1.0)], dtype=torch.float64)
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (found.tolist(), list(pipeline.state_dict())))
    columns = zip(*(values for values, _ in gathered), strict=True)  # NaN is the worst of all
    gradient, loss_difference = (max(column, key=lambda value: (value != value, value)) for column in columns)
    names = {name for _, some in gathered for name in some} == set(reference.state_dict())
    passed = gradient <= limit and loss_difference <= limit and names
    if dist.get_rank() == 0:
        print(f"largest relative difference: gradients {gradient:.1e}, loss {loss_difference:.1e} (at most {limit})")
        print(f"state_dict names {'are' if names else 'ARE NOT'} the model's")
        print("check passed" if passed else "check FAILED")
    return 0 if passed else 1


def differences(pipeline, reference):
    """The largest gradient difference of this rank, relative to each tensor's largest value.

    A gradient that is nothing but rounding, such as a bias before a softmax, is held against the largest of all.
    """
    expected = {name: p.grad for name, p in reference.named_parameters(remove_duplicate=False)}
    largest = max(grad.abs().max().item() for grad in expected.values() if grad is not None)
    worst = 0.0
    for name, parameter in pipeline.named_parameters().items():
        if expected[name] is None:
            continue
        scale, found = expected[name].abs().max().item(), parameter.grad
        if scale < 16 * torch.finfo(parameter.dtype).eps * largest:
            scale = largest
        gap = (expected[name] if found is None else found - expected[name]).abs().max().item() / scale
        worst = gap if not gap <= worst else worst  # NaN is the worst of all
    return worst


def main():
    """Train, or check."""
    parser = argparse.ArgumentParser(description="Trains a model in pipeline stages.")
    parser.add_argument("--model", type=Path, default=MODEL, required=MODEL is None, help="the model's file")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--check", action="store_true", help="compare one step with one process")
    arguments = parser.parse_args()
    if int(os.environ.get("WORLD_SIZE", 1)) != RANKS * REPLICAS:
        sys.exit(f"start {RANKS * REPLICAS} processes: torchrun --nproc-per-node {RANKS * REPLICAS} {__file__}")
    workload = load(arguments.model)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"]))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    torch.manual_seed(0)  # every rank builds the same model
    model = getattr(workload, BUILDER)()
    torch.manual_seed(0)
    batch = workload.example_batch(MICRO_BATCH * MICRO_BATCHES * REPLICAS)  # put your data here
    code = 0
    if arguments.check:
        model.eval()  # no dropout
        reference = copy.deepcopy(model).to(device)
        code = check(Pipeline(model, workload.loss_fn, device), reference, workload, batch)
    else:
        train(Pipeline(model, workload.loss_fn, device), batch, arguments)
    dist.destroy_process_group()
    sys.exit(code)


def train(pipeline, batch, arguments):
    """Some steps on one batch."""
    optimizer = OPTIMIZER(pipeline.parameters(), lr=arguments.lr)
    for step in range(arguments.steps):
        loss = pipeline.step(*batch)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}   loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
