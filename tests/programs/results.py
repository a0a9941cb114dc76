"""What a forward returns, leaves elsewhere, and what layers it is made of."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, Normal, kl_divergence
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from roundelay import Job
from tests.programs.table import Body, batches, entropy, job, refused, trains, trains_with_draws


@trains
def an_auxiliary_loss_in_an_attribute() -> Job:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.expert, self.balance = nn.Linear(8, 4), nn.Linear(8, 16), 0.0

        def forward(self, x: Tensor) -> Tensor:
            share = self.gate(x).softmax(-1)
            self.balance = 4 * share.mean(0).pow(2).sum()
            return self.expert(x) * share.amax(-1, keepdim=True)

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor) -> Tensor:
            return self.rest(self.experts(x))

    model = Model()
    return job(model, lambda outputs, batch: entropy(outputs, batch) + 10 * model.experts.balance)


class Layer(nn.Module):
    """Adds its own loss to a list that it shares with others."""

    def __init__(self, losses: list[Tensor]) -> None:
        super().__init__()
        self.linear, self.losses = nn.Linear(16, 16), losses

    def forward(self, h: Tensor) -> Tensor:
        """16 to 16."""
        h = torch.relu(self.linear(h))
        self.losses.append(h.pow(2).mean())
        return h


class Collecting(Body):
    """Two such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.layers = nn.ModuleList([Layer(self.losses), Layer(self.losses)])

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        self.losses.clear()
        h = self.first(x)
        for layer in self.layers:
            h = layer(h)
        return self.rest(h)


@trains
def auxiliary_losses_in_a_list_that_layers_share() -> Job:
    model = Collecting()
    return job(model, lambda outputs, batch: entropy(outputs, batch) + sum(model.losses))


@trains
def auxiliary_losses_in_a_list_that_the_loss_clears() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            self.losses.append(h.mean())
            self.losses.append(h.pow(2).mean())
            return self.rest(h)

    model = Model()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        value = entropy(outputs, batch) + torch.stack(model.losses).sum()
        model.losses.clear()
        return value

    return job(model, loss)


@trains
def features_in_nested_dicts_and_in_an_object() -> Job:
    class Holder:
        aux: Tensor

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.cache: dict[str, Any] = {}

        def forward(self, x: Tensor) -> Tensor:
            self.cache["h"] = h = self.first(x)
            self.cache["deep"] = {"pair": (h * 2, "text")}
            self.holder = Holder()
            self.holder.aux = h.abs().mean()
            return self.rest(h)

    model = Model()

    def loss(outputs: Tensor, batch: Any) -> Tensor:
        deep = model.cache["deep"]["pair"][0]
        return entropy(outputs, batch) + model.cache["h"].mean() + deep.pow(2).mean() + model.holder.aux

    return job(model, loss)


@trains
def features_that_a_hook_keeps() -> Job:
    model, kept = Body(), {}
    model.b.register_forward_hook(lambda module, args, output: kept.update(h=output, x=args[0].detach()))
    return job(model, lambda outputs, batch: entropy(outputs, batch) + functional.mse_loss(kept["h"], kept["x"]))


@trains
def a_feature_that_is_an_output_too() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            self.h = h = self.first(x)
            return self.rest(h), h

    model = Model()
    return job(model, lambda o, b: entropy(o[0], b) + model.h.mean() + o[1].pow(2).mean())


@trains
def an_attribute_that_another_part_reads() -> Job:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 16)

        def forward(self, x: Tensor) -> Tensor:
            self.out = torch.relu(self.linear(x))
            return self.out

    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, x: Tensor) -> Tensor:
            self.encoder(x)
            return self.rest(self.encoder.out)

    return job(Model())


@trains
def a_named_tuple() -> Job:
    result = namedtuple("result", "logits hidden")

    class Model(Body):
        def forward(self, x: Tensor) -> Any:
            h = self.first(x)
            return result(self.rest(h), h)

    return job(Model(), lambda outputs, batch: entropy(outputs.logits, batch) + outputs.hidden.mean())


@trains
def a_dataclass() -> Job:
    @dataclass
    class Result:
        logits: Tensor
        hidden: Tensor
        weight: int = 3

    class Model(Body):
        def forward(self, x: Tensor) -> Result:
            h = self.first(x)
            return Result(self.rest(h), h)

    return job(Model(), lambda outputs, batch: entropy(outputs.logits, batch) + outputs.weight * outputs.hidden.mean())


@trains
def an_object_of_an_own_class() -> Job:
    class Result:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Model(Body):
        def forward(self, x: Tensor) -> Result:
            return Result(super().forward(x))

    return job(Model(), lambda outputs, batch: entropy(outputs.logits, batch))


@trains
def a_distribution_as_the_result() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Normal:
            return Normal(super().forward(x), 1.0)

    def loss(outputs: Normal, batch: Any) -> Tensor:
        prior = kl_divergence(outputs, Normal(torch.zeros(4), torch.ones(4))).mean()
        return 0.1 * prior - outputs.log_prob(functional.one_hot(batch[1], 4).float()).mean()

    return job(Model(), loss)


@trains
def a_categorical_distribution() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Categorical:
            return Categorical(logits=super().forward(x))

    return job(Model(), lambda o, b: -o.log_prob(b[1]).mean() - 0.01 * o.entropy().mean())


@trains_with_draws
def a_sample_of_a_distribution() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.mean, self.spread, self.head = nn.Linear(16, 6), nn.Linear(16, 6), nn.Linear(6, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            h = self.first(x)
            code = Normal(self.mean(h), functional.softplus(self.spread(h)) + 1e-3)
            return self.head(code.rsample()), kl_divergence(code, Normal(torch.zeros(6), torch.ones(6))).sum(1)

    return job(Model(), lambda outputs, batch: entropy(outputs[0], batch) + 0.1 * outputs[1].mean())


@trains
def the_loss_itself() -> Job:
    class Model(Body):
        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.cross_entropy(super().forward(x), labels)

    return job(Model(), lambda outputs, batch: outputs, inputs=lambda batch: (batch, {}))


class Causal(nn.Module):
    """An encoder with a causal and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of a row of words; the first is none of padding."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        padding = x.eq(0) & (torch.arange(x.size(1)) > 0)
        return self.head(self.encoder(self.embed(x), mask=mask, src_key_padding_mask=padding).mean(1))


@trains
def an_encoder_with_two_masks() -> Job:
    return job(Causal(), data=batches(5, words=20))


@trains
def an_encoder_with_a_decoder() -> Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
            self.both = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
            out = self.both(self.embed(x), self.embed(x.flip(1)), tgt_mask=mask, tgt_is_causal=True)
            return self.head(out.mean(1))

    return job(Model(), data=batches(5, words=20))


@trains
def attention_whose_weights_the_loss_reads() -> Job:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
            self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            h = self.embed(x)
            out, self.weights = self.attention(h, h, h)
            return self.head(out.mean(1))

    model = Model()
    return job(model, lambda o, b: entropy(o, b) + model.weights.pow(2).mean(), batches(5, words=20))


@trains
def a_branch_by_torch_cond() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            h = self.a(x)
            return self.rest(torch.cond(x[0, 0] > 0, torch.relu, torch.tanh, (h,)))  # either way, by the batch

    return job(Model())


@trains
def activation_checkpointing() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(checkpoint(lambda h: torch.relu(self.b(h)), self.first(x), use_reentrant=False))

    return job(Model())


@trains
def hooks_that_change_what_they_see() -> Job:
    model = Body()
    model.b.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    model.b.register_forward_hook(lambda module, args, output: output * 0.5)
    return job(model)


@trains
def hooks_that_the_first_call_installs() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.installed, self.kept = False, []

        def forward(self, x: Tensor) -> Tensor:
            if not self.installed:
                self.b.register_forward_hook(lambda module, args, output: self.kept.append(output))
                self.installed = True
            self.kept.clear()
            return super().forward(x)

    model = Model()
    return job(model, lambda outputs, batch: entropy(outputs, batch) + sum(h.pow(2).mean() for h in model.kept))


@trains
def autocast_inside() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                h = self.b(self.first(x))
            return self.c(h.float())

    return job(Model())


@trains
def counters_and_sizes_that_nobody_reads() -> Job:
    class Model(Body):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.widths = 0, []

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.widths.append(x.shape[1])
            self.rows = x.size(0)
            return super().forward(x)

    return job(Model())


@refused("torch.vmap in the model's forward")
def vmap() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> Tensor:
            return self.rest(torch.vmap(lambda row: torch.relu(row) * row.sum())(self.a(x)))

    return job(Model())


@refused(r"torch.autograd.grad in the model's forward, .*results.py:\d+ ")
def forces() -> Job:
    class Model(Body):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = x.detach().requires_grad_()
            energy = super().forward(x)
            return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]

    return job(Model(), lambda outputs, batch: outputs[0].pow(2).mean() + (outputs[1] - batch[0]).pow(2).mean())
