"""A zoo of small models, as their authors would write them: for the tests of capture, stages and parity.

Every case has the three functions of a model file: ``build_model()``, ``example_batch(n) -> (inputs, target)`` and
``loss_fn(output, target)``. Dropout is 0 where a model has it, so that one process and many draw alike.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Inputs = tuple[Any, ...] | Mapping[str, Any]
VOCABULARY = 61
LENGTH = 12


@dataclass(frozen=True)
class Case:
    """One model of the zoo.

    ``whole`` are the modules that must be kept whole, ``refused`` a text that the refusal must hold, ``unplanned`` one
    that planning must say of a model whose stages train, ``fixed`` says that only the example's micro-batch size works,
    ``fast`` that it belongs to every test run.
    """

    name: str
    build_model: Callable[[], nn.Module]
    example_batch: Callable[[int], tuple[Inputs, Any]]
    loss_fn: Callable[[Any, Any], torch.Tensor]
    whole: tuple[str, ...] = ()
    refused: str = ""
    unplanned: str = ""
    fixed: bool = False
    fast: bool = False
    tags: frozenset[str] = field(default_factory=frozenset)


ZOO: dict[str, Case] = {}


def case(
    example: Callable[[int], tuple[Inputs, Any]], loss: Callable[[Any, Any], torch.Tensor], **options: Any
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Add a builder to the zoo under its own name."""

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        name = build.__name__
        ZOO[name] = Case(name, build, example, loss, **options)
        return build

    return register


# ---------------------------------------------------------------------------- batches and losses


def tokens(n: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (n, LENGTH))


def token_batch(n: int) -> tuple[Inputs, Any]:
    return {"input_ids": tokens(n)}, tokens(n)


def labelled_batch(n: int) -> tuple[Inputs, Any]:
    ids = tokens(n)
    return {"input_ids": ids, "labels": ids.clone()}, None


def masked_batch(n: int) -> tuple[Inputs, Any]:
    mask = torch.ones(n, LENGTH, dtype=torch.long)
    mask[:, -3:] = torch.arange(n)[:, None] % 2
    return {"input_ids": tokens(n), "attention_mask": mask}, tokens(n)


def image_batch(n: int) -> tuple[Inputs, Any]:
    return (torch.randn(n, 3, 16, 16),), torch.randint(0, 7, (n,))


def vector_batch(n: int) -> tuple[Inputs, Any]:
    return (torch.randn(n, 8),), torch.randn(n, 8)


def sequence_batch(n: int) -> tuple[Inputs, Any]:
    return (torch.randn(n, LENGTH, 8),), torch.randn(n, LENGTH, 8)


def pair_batch(n: int) -> tuple[Inputs, Any]:
    return (torch.randn(n, 8), torch.randn(n, 8)), torch.randn(n, 8)


def token_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    logits = output.logits if hasattr(output, "logits") else output
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def own_loss(output: Any, target: Any) -> torch.Tensor:
    return output.loss  # type: ignore[no-any-return]


def class_loss(output: Any, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.logits if hasattr(output, "logits") else output, target)


def square_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target)


def pooled_loss(output: Any, target: Any) -> torch.Tensor:
    return (output.last_hidden_state * torch.linspace(-1, 1, output.last_hidden_state.shape[-1])).square().mean()


# ---------------------------------------------------------------------------- transformers


def _transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers


def _gpt2(**options: Any) -> nn.Module:
    t = _transformers()
    config = t.GPT2Config(
        n_layer=4, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32, resid_pdrop=0, embd_pdrop=0,
        attn_pdrop=0, bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    return t.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


@case(token_batch, token_loss, fast=True)
def gpt2() -> nn.Module:
    return _gpt2()


@case(labelled_batch, own_loss, fast=True)
def gpt2_labels() -> nn.Module:
    return _gpt2()


@case(masked_batch, token_loss)
def gpt2_mask() -> nn.Module:
    return _gpt2()


@case(token_batch, token_loss)
def gpt2_untied() -> nn.Module:
    return _gpt2(tie_word_embeddings=False)


def _llama(**options: Any) -> nn.Module:
    t = _transformers()
    config = t.LlamaConfig(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=32, bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    return t.LlamaForCausalLM(config)  # type: ignore[no-any-return]


@case(token_batch, token_loss, fast=True)
def llama() -> nn.Module:
    return _llama()


@case(token_batch, token_loss)
def llama_tied() -> nn.Module:
    return _llama(tie_word_embeddings=True)


@case(token_batch, token_loss)
def llama_checkpointed() -> nn.Module:
    model = _llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model


@case(masked_batch, pooled_loss)
def bert() -> nn.Module:
    t = _transformers()
    config = t.BertConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=4, vocab_size=VOCABULARY,
        max_position_embeddings=32, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return t.BertModel(config, add_pooling_layer=False)  # type: ignore[no-any-return]


def _vit_batch(n: int) -> tuple[Inputs, Any]:
    return {"pixel_values": torch.randn(n, 3, 16, 16)}, torch.randint(0, 7, (n,))


@case(_vit_batch, class_loss)
def vit() -> nn.Module:
    t = _transformers()
    config = t.ViTConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=4, image_size=16, patch_size=4,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0, num_labels=7,
    )  # fmt: skip
    return t.ViTForImageClassification(config)  # type: ignore[no-any-return]


def _translation_batch(n: int) -> tuple[Inputs, Any]:
    return {"input_ids": tokens(n), "labels": tokens(n)}, None


@case(_translation_batch, own_loss, fast=True)
def t5() -> nn.Module:
    t = _transformers()
    config = t.T5Config(
        num_layers=2, d_model=32, d_ff=48, d_kv=8, num_heads=4, vocab_size=VOCABULARY, dropout_rate=0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return t.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


def _speech_batch(n: int) -> tuple[Inputs, Any]:
    return {"input_features": torch.randn(n, 8, 32), "labels": tokens(n)}, None


@case(_speech_batch, own_loss)
def whisper() -> nn.Module:
    t = _transformers()
    config = t.WhisperConfig(
        encoder_layers=2, decoder_layers=2, d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48,
        encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=VOCABULARY, num_mel_bins=8,
        max_source_positions=16, max_target_positions=32, dropout=0, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return t.WhisperForConditionalGeneration(config)  # type: ignore[no-any-return]


def _mixtral(**options: Any) -> nn.Module:
    t = _transformers()
    config = t.MixtralConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=32,
        bos_token_id=None, eos_token_id=None, **options,
    )  # fmt: skip
    return t.MixtralForCausalLM(config)  # type: ignore[no-any-return]


@case(labelled_batch, own_loss)
def mixtral() -> nn.Module:
    return _mixtral()


@case(labelled_batch, own_loss)
def mixtral_router_loss() -> nn.Module:
    return _mixtral(output_router_logits=True, router_aux_loss_coef=0.1)


@case(labelled_batch, own_loss)
def qwen3_moe() -> nn.Module:
    t = _transformers()
    config = t.Qwen3MoeConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=VOCABULARY, num_experts=4, num_experts_per_tok=2,
        decoder_sparse_step=1, max_position_embeddings=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return t.Qwen3MoeForCausalLM(config)  # type: ignore[no-any-return]


@case(token_batch, token_loss)
def gemma2() -> nn.Module:
    t = _transformers()
    config = t.Gemma2Config(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=VOCABULARY, max_position_embeddings=32, sliding_window=6, bos_token_id=None,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return t.Gemma2ForCausalLM(config)  # type: ignore[no-any-return]


# ---------------------------------------------------------------------------- convolutions


class UNet(nn.Module):
    """Down, up, and a skip across each level."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()

        def block(i: int, o: int) -> nn.Sequential:
            return nn.Sequential(
                nn.Conv2d(i, o, 3, padding=1), nn.ReLU(inplace), nn.Conv2d(o, o, 3, padding=1), nn.ReLU(inplace)
            )

        self.down1, self.down2, self.middle = block(3, 8), block(8, 16), block(16, 16)
        self.up2, self.up1 = block(32, 8), block(16, 8)
        self.pool, self.grow = nn.MaxPool2d(2), nn.Upsample(scale_factor=2)
        self.last = nn.Conv2d(8, 7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.down1(x)
        second = self.down2(self.pool(first))
        x = self.grow(self.middle(self.pool(second)))
        x = self.grow(self.up2(torch.cat([x, second], 1)))
        return self.last(self.up1(torch.cat([x, first], 1))).mean((2, 3))


@case(image_batch, class_loss, fast=True)
def unet() -> nn.Module:
    return UNet(inplace=False)


@case(image_batch, class_loss, fast=True)
def unet_inplace() -> nn.Module:
    return UNet(inplace=True)


class Residual(nn.Module):
    """Two convolutions with batch norm and a shortcut."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o)) if i != o else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += x if self.shortcut is None else self.shortcut(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A small residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.layer1 = nn.Sequential(Residual(8, 8, 1), Residual(8, 8, 1))
        self.layer2 = nn.Sequential(Residual(8, 16, 2), Residual(16, 16, 1))
        self.fc = nn.Linear(16, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(x)), inplace=True)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layer2(self.layer1(x)), 1), 1))


@case(image_batch, class_loss, fast=True)
def resnet() -> nn.Module:
    return ResNet()


# ---------------------------------------------------------------------------- plain modules


@case(vector_batch, square_loss, fast=True)
def sequential() -> nn.Module:
    return nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(8, 8), nn.Tanh())])


class SharedLinear(nn.Module):
    """One module used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.shared(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.shared(torch.tanh(self.shared(x)))))


@case(vector_batch, square_loss, fast=True)
def shared_linear() -> nn.Module:
    return SharedLinear()


class DictOutput(nn.Module):
    """Nested outputs with numbers, None and a tensor from an early layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, scale: float = 1.0, flag: bool = True) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = torch.tanh(block(x)) * scale
            hidden.append(x)
        return {"out": x, "early": (hidden[0], None), "rows": x.shape[0], "name": "dict", "flag": flag}


def _dict_batch(n: int) -> tuple[Inputs, Any]:
    return {"x": torch.randn(n, 8), "scale": 1.5, "flag": False}, torch.randn(n, 8)


def _dict_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    assert output["name"] == "dict"
    assert output["rows"] == target.shape[0]
    assert output["flag"] is False
    return F.mse_loss(output["out"], target) + 0.1 * output["early"][0].square().mean()


@case(_dict_batch, _dict_loss, fast=True)
def dict_output() -> nn.Module:
    return DictOutput()


class Recurrent(nn.Module):
    """An embedding, a recurrent network and a head."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.rnn = kind(16, 16, num_layers=2, batch_first=True)
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, _ = self.rnn(self.embed(input_ids))
        return self.head(self.norm(x))


@case(token_batch, token_loss, fast=True)
def lstm() -> nn.Module:
    return Recurrent(nn.LSTM)


@case(token_batch, token_loss)
def gru() -> nn.Module:
    return Recurrent(nn.GRU)


class Translator(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.transformer = nn.Transformer(16, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        x = self.transformer(self.embed(source), self.embed(target), tgt_mask=mask, tgt_is_causal=True)
        return self.head(x)


def _two_tokens(n: int) -> tuple[Inputs, Any]:
    return (tokens(n), tokens(n)), tokens(n)


@case(_two_tokens, token_loss, fast=True)
def nn_transformer() -> nn.Module:
    return Translator()


@case(vector_batch, square_loss, fast=True)
def weight_norm() -> nn.Module:
    wrap = torch.nn.utils.parametrizations.weight_norm
    return nn.Sequential(*[m for _ in range(4) for m in (wrap(nn.Linear(8, 8)), nn.Tanh())])


class Averaged(nn.Module):
    """A layer that keeps a moving average of what passes, and subtracts it."""

    def __init__(self, assign: bool) -> None:
        super().__init__()
        self.linear, self.assign = nn.Linear(8, 8), assign
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("scratch", torch.ones(8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if self.assign:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        else:
            with torch.no_grad():
                self.average.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return torch.tanh(x - self.average) * self.scratch


@case(vector_batch, square_loss, fast=True)
def ema_buffers() -> nn.Module:
    return nn.Sequential(Averaged(True), Averaged(False), Averaged(True), Averaged(False))


class Fourier(nn.Module):
    """Mixes positions by a Fourier transform, as FNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(torch.fft.fft2(x.float()).real)))


@case(sequence_batch, square_loss)
def fft() -> nn.Module:
    return nn.Sequential(*[Fourier() for _ in range(4)])


class _Rounded(torch.autograd.Function):
    """Rounds forward, passes the doubled gradient backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Quantised(nn.Module):
    """A straight-through estimator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(_Rounded.apply(x)))


@case(vector_batch, square_loss, whole=("1", "3"), fast=True)
def custom_function() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Quantised(), nn.Linear(8, 8), Quantised(), nn.Linear(8, 8))


@case(vector_batch, square_loss, whole=("2",))
def backward_hook() -> nn.Module:
    model = nn.Sequential(*[m for _ in range(4) for m in (nn.Linear(8, 8), nn.Tanh())])
    model[2].register_full_backward_hook(lambda module, given, made: (given[0] * 3,))
    return model


class Checkpointed(nn.Module):
    """Blocks that the model itself recomputes."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(8, 8), nn.Linear(8, 8), reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return self.last(x)


@case(vector_batch, square_loss)
def checkpoint_non_reentrant() -> nn.Module:
    return Checkpointed(False)


@case(vector_batch, square_loss)
def checkpoint_reentrant() -> nn.Module:
    return Checkpointed(True)


class Branch(nn.Module):
    """Looks at the data to choose its way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum().item() > 0:
            return torch.tanh(self.linear(x))
        return torch.tanh(self.other(x))


@case(vector_batch, square_loss, whole=("1", "3"))
def control_flow() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Branch(), nn.Linear(8, 8), Branch(), nn.Linear(8, 8))


@case(vector_batch, square_loss, refused="models.py:")
def control_flow_in_root() -> nn.Module:
    return Branch()


class Experts(nn.Module):
    """A mixture that loops over its experts and indexes the rows of each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weight[rows, None])
        return x + out


class Mixture(nn.Module):
    """Blocks with a loop over experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.layers = nn.ModuleList(Experts() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


@case(vector_batch, square_loss)
def moe_loop() -> nn.Module:
    return Mixture()


class TwoTowers(nn.Module):
    """Two encoders that meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.right = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.meet = nn.Bilinear(8, 8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.meet(self.left(a), self.right(b))


@case(pair_batch, square_loss, fast=True)
def two_towers() -> nn.Module:
    return TwoTowers()


class LateInput(nn.Module):
    """An integer input that only the last layer reads."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.choice = nn.Embedding(5, 8)

    def forward(self, x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x * self.choice(which)


def _late_batch(n: int) -> tuple[Inputs, Any]:
    return (torch.randn(n, 8), torch.randint(0, 5, (n,))), torch.randn(n, 8)


@case(_late_batch, square_loss, fast=True)
def late_integer() -> nn.Module:
    return LateInput()


class Adapter(nn.Module):
    """A frozen linear layer with a trained low-rank part."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


@case(vector_batch, square_loss)
def lora() -> nn.Module:
    frozen = [m for _ in range(2) for m in (nn.Linear(8, 8).requires_grad_(False), nn.Tanh())]
    return nn.Sequential(*frozen, Adapter(), Adapter(), nn.Linear(8, 8).requires_grad_(False), Adapter())


class Siamese(nn.Module):
    """One encoder, run on both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.head((self.encoder(a) - self.encoder(b)).abs())


@case(pair_batch, square_loss)
def siamese() -> nn.Module:
    return Siamese()


class BatchBranch(nn.Module):
    """Chooses by the size of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * (1.0 if x.shape[0] > 3 else 2.0)
        return x


@case(vector_batch, square_loss, fixed=True)
def batch_branch() -> nn.Module:
    return BatchBranch()


class Positions(nn.Module):
    """Attention written out, with a mask and sinusoidal positions made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.position = nn.Parameter(torch.randn(1, LENGTH, 16) * 0.02)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"qkv": nn.Linear(16, 48), "out": nn.Linear(16, 16), "norm": nn.LayerNorm(16)})
            for _ in range(3)
        )
        self.head = nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        n, length = input_ids.shape
        mask = torch.full((length, length), float("-inf")).triu(1)
        mask[:, 0] = 0
        x = self.embed(input_ids) + self.position.expand(n, -1, -1)
        for layer in self.layers:
            q, k, v = layer["qkv"](layer["norm"](x)).chunk(3, -1)
            scores = q @ k.transpose(-1, -2) / math.sqrt(16) + mask
            x = x + layer["out"](scores.softmax(-1) @ v)
        return self.head(x)


@case(token_batch, token_loss, fast=True)
def own_attention() -> nn.Module:
    return Positions()


class Autocast(nn.Module):
    """A frozen backbone under no_grad, and a trained part under autocast, both in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.backbone(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks:
                x = torch.tanh(block(x))
        return self.last(x.float())


@case(vector_batch, square_loss, fast=True)
def modes() -> nn.Module:
    return Autocast()


class LateDetached(nn.Module):
    """A value that early blocks differentiate and a late one only looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.tanh(self.blocks[0](x))
        x = first
        for block in self.blocks[1:]:
            x = torch.tanh(block(x))
        return x * (first > 0) + first.detach()


@case(vector_batch, square_loss, fast=True)
def late_detached() -> nn.Module:
    return LateDetached()


# ---------------------------------------------------------------------------- harder ones


class TensorHook(nn.Module):
    """Halves the gradient of a tensor by a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(x)


@case(vector_batch, square_loss, whole=("0", "2", "4"))
def tensor_hook() -> nn.Module:
    return nn.Sequential(TensorHook(), nn.Linear(8, 8), TensorHook(), nn.Linear(8, 8), TensorHook())


class Padded(nn.Module):
    """A recurrent network on packed sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(16, 16, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=LENGTH)[0]


class PackedSequence(nn.Module):
    """A tagger over sequences of unequal length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.padded, self.head = nn.Embedding(VOCABULARY, 16), Padded(), nn.Linear(16, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.head(self.padded(self.embed(input_ids), lengths))


def _packed_batch(n: int) -> tuple[Inputs, Any]:
    return (tokens(n), torch.randint(3, LENGTH, (n,))), tokens(n)


@case(_packed_batch, token_loss, whole=("padded",))
def packed_sequence() -> nn.Module:
    return PackedSequence()


class InnerGradient(nn.Module):
    """Subtracts the gradient of an energy, which it differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            at = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.energy(at)).sum(), at, create_graph=True)
        return x - slope


@case(vector_batch, square_loss, whole=("0", "1", "2", "3"))
def inner_gradient() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), InnerGradient(), InnerGradient(), nn.Linear(8, 8))


class SharedNorm(nn.Module):
    """One batch norm for all layers: its statistics tie them together."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(self.norm(block(x)))
        return self.last(x)


def _two_rows(n: int) -> tuple[Inputs, Any]:
    return vector_batch(max(n, 2))


@case(_two_rows, square_loss)
def shared_norm() -> nn.Module:
    return SharedNorm()


@case(vector_batch, square_loss)
def spectral_norm() -> nn.Module:
    wrap = torch.nn.utils.spectral_norm
    return nn.Sequential(*[m for _ in range(4) for m in (wrap(nn.Linear(8, 8)), nn.Tanh())])


class Attribute(nn.Module):
    """Leaves a part of the loss in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.penalty = x.square().mean()
        return torch.tanh(x)


class Penalised(nn.Module):
    """Collects the penalties of its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attribute() for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self.blocks:
            x = block(x)
        return x, torch.stack([block.penalty for block in self.blocks]).sum()


def _penalised_loss(output: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output[0], target) + 0.1 * output[1]


@case(vector_batch, _penalised_loss)
def penalties() -> nn.Module:
    return Penalised()


class ChangesInput(nn.Module):
    """Cannot be exported, and changes what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += 0.1 * min(x.abs().max().item(), 1.0)
        return torch.tanh(self.linear(x))


class ChangedInputs(nn.Module):
    """Its residual stream is changed in place by modules that are kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.change = nn.Linear(8, 8), ChangesInput()
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last(self.change(x) + x)


@case(vector_batch, square_loss, whole=("change",))
def changed_input() -> nn.Module:
    return ChangedInputs()


# ---------------------------------------------------------------------------- losses that are no mean over rows


def _uneven_batch(n: int) -> tuple[Inputs, Any]:
    target = tokens(n)
    return (target.roll(1, 1),), target.masked_fill(torch.arange(LENGTH) >= 4 + 3 * torch.arange(n)[:, None] % 8, -100)


@case(_uneven_batch, token_loss)
def uneven_tokens() -> nn.Module:
    return Positions()


def _sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum")


@case(vector_batch, _sum_loss)
def summed() -> nn.Module:
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(8, 8), nn.Tanh())])


# ---------------------------------------------------------------------------- something left for the next forward


class HiddenState(nn.Module):
    """Goes on from the batch before, whose mean it keeps in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.hidden: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.linear(x) if self.hidden is None else self.linear(x) + self.hidden)
        self.hidden = x.detach().mean(0)
        return x


@case(vector_batch, square_loss, whole=("0", "2"))
def hidden_state() -> nn.Module:
    return nn.Sequential(HiddenState(), nn.Linear(8, 8), HiddenState(), nn.Linear(8, 8))


class Annealed(nn.Module):
    """Counts its steps in a buffer, and cools down with them; its temperature is a plain number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(8, 8), 1.0
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.temperature *= 0.9
        return torch.tanh(self.linear(x) / (1 + 0.1 * self.steps) / self.temperature)


@case(vector_batch, square_loss, whole=("0", "2"))
def counter() -> nn.Module:
    return nn.Sequential(Annealed(), nn.Linear(8, 8), Annealed(), nn.Linear(8, 8))


class Distilled(nn.Module):
    """A teacher that follows its student: parameters that the forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.teacher = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
        self.middle, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            target = self.teacher(b)
        return self.head(torch.tanh(self.middle(self.student(a)))) - target


@case(pair_batch, square_loss)
def byol() -> nn.Module:
    return Distilled()


class Bank(nn.Module):
    """Compares with the rows of earlier batches, which it keeps in a buffer that goes round."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("queue", torch.randn(12, 8))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        likeness = self.linear(x) @ self.queue.clone().t()
        rows = (torch.arange(x.shape[0]) + int(self.place)) % 12
        self.queue[rows] = x.detach()
        self.place[0] = (int(self.place) + x.shape[0]) % 12
        return likeness


@case(vector_batch, square_loss, whole=("2",))
def memory_bank() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Bank(), nn.Linear(12, 8))


class CheckpointedNorm(nn.Module):
    """Batch norms in blocks that the model itself recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.last(x)


@case(_two_rows, square_loss)
def checkpointed_norm() -> nn.Module:
    return CheckpointedNorm()


# ---------------------------------------------------------------------------- random numbers, odd tensors and outputs


class Noisy(nn.Module):
    """Adds noise, and leaves a block out for some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            kept = (torch.rand(x.shape[0], 1) < 0.8).float() / 0.8
            x = x + kept * torch.tanh(block(x + 0.1 * torch.randn_like(x)))
        return x


@case(vector_batch, square_loss)
def noise() -> nn.Module:
    return Noisy()


class LayerDrop(nn.Module):
    """Leaves blocks out by Python's own random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if random.random() < 0.5:
                x = x + torch.tanh(block(x))
        return x


@case(vector_batch, square_loss, refused="models.py:")
def layer_drop() -> nn.Module:
    return LayerDrop()


@case(vector_batch, square_loss)
def complex_parameters() -> nn.Module:
    return nn.Sequential(*[m for _ in range(3) for m in (Spectrum(), nn.Linear(8, 8))])


class Spectrum(nn.Module):
    """Filters by complex weights in the frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.cfloat))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8)


class SparseEmbedding(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, 16, sparse=True), nn.Linear(16, VOCABULARY)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@case(token_batch, token_loss, unplanned="the gradient of embed is sparse")
def sparse_embedding() -> nn.Module:
    return SparseEmbedding()


class Unused(nn.Module):
    """A nested output, of which the loss reads a part: heads and hidden states that nobody needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.extra = nn.Linear(8, 3)

    def forward(self, *, x: torch.Tensor, scale: float) -> dict[str, Any]:
        hidden = []
        for block in self.blocks:
            x = torch.tanh(block(x)) * scale
            hidden.append({"mean": x.mean(), "x": (x, None)})
        return {"extra": self.extra(hidden[0]["x"][0]), "hidden": hidden, "size": 2 * x.shape[0], "x": [x]}


def _unused_batch(n: int) -> tuple[Inputs, Any]:
    return {"x": torch.randn(n, 8), "scale": 1.5}, torch.randn(n, 8)


def _unused_loss(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
    assert output["size"] == 2 * target.shape[0]
    return F.mse_loss(output["x"][0], target) + output["hidden"][1]["mean"].square()


@case(_unused_batch, _unused_loss)
def unused_outputs() -> nn.Module:
    return Unused()


class FarParameter(nn.Module):
    """A parameter of the model's own that its first and its last block use, and a stack that each takes a row of."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.rows = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(4, 8))
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for n, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) + self.rows[n]
        return x * self.scale


@case(vector_batch, square_loss)
def far_parameter() -> nn.Module:
    return FarParameter()


class InnerLoss(nn.Module):
    """Returns its loss, and numbers to be logged."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        for block in self.blocks:
            x = torch.tanh(block(x))
        loss = F.mse_loss(x, y)
        return loss, {"loss": loss.detach(), "rows": x.shape[0]}


def _inner_loss_batch(n: int) -> tuple[Inputs, Any]:
    return (torch.randn(n, 8), torch.randn(n, 8)), None


def _first_output(output: tuple[torch.Tensor, Any], target: Any) -> torch.Tensor:
    return output[0]


@case(_inner_loss_batch, _first_output)
def inner_loss() -> nn.Module:
    return InnerLoss()


class Strided(nn.Module):
    """Transposed, expanded and sliced values across its blocks, and a slice that is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.last = nn.Linear(8, 24), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(size, size) for size in (LENGTH, 8, LENGTH, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, x, last = self.split(x).chunk(3, -1)
        skip = first[:, ::2, :1].expand(-1, -1, 8)
        for block in self.blocks:
            x = torch.tanh(block(x.transpose(1, 2) if block.in_features != x.shape[-1] else x))
        x = x + last.flip(-1)
        x[:, ::2] += skip
        return self.last(x.unflatten(1, (2, -1)).permute(0, 2, 1, 3).flatten(1, 2))


@case(sequence_batch, square_loss)
def strided() -> nn.Module:
    return Strided()
