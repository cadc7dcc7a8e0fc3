"""A loss over micro-batches: the sum over them is the loss of the batch, gradients too, or the plan is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.errors import Infeasible
from fourfold.graph import Graph, Op, Ref, Size, TensorSpec
from fourfold.graph.capture import capture, mean_square
from fourfold.models import MODELS
from fourfold.plans import Mesh, Plan, lower, named
from fourfold.plans.lowering.additive_loss import MicroLoss, microbatch_loss
from fourfold.runtime.comm.world import World
from fourfold.runtime.execution.executor import Executor
from ranks import Job, lists_of, run_jobs, stepped
from small import SMALL, batch_of, graph_of

Loss = Callable[..., Tensor]
Run = tuple[dict[str, float], dict[str, Tensor]]

BATCH, CLASSES = 7, 5


def executed(graph: Graph, batch: int, state: dict[str, Tensor], feeds: dict[str, Tensor]) -> Run:
    """Outputs of no dims and gradients of one rank."""
    plan = Plan(graph=graph.hash, batch=batch, mesh=Mesh.of(data=1))
    world = World.join(Mesh.of(data=1))
    lists = lists_of(lower(graph, plan), world)
    executor = Executor(lists, world, lambda key, _: state[key].clone(), dtypes={"float32": torch.float64})
    given = {n: executor.cut(n, feeds[n]) for n in (*graph.inputs, *graph.targets)}
    out = stepped(executor, given)[1] if graph.loss else executor.forward(given)
    scalars = {n: t.item() for n, t in out.items() if not t.dim()}
    return scalars, {executor.keys[n]: t.grad for n, t in executor.state.items() if t.grad is not None}


def counted(micro: MicroLoss, sizes: list[int], state: dict[str, Tensor], parts: list[dict[str, Tensor]]) -> dict[str, float]:
    """Scales that are one over a count of the whole batch."""
    if micro.counts is None:
        return {}
    runs = [executed(micro.counts, n, state, feeds)[0] for n, feeds in zip(sizes, parts, strict=True)]
    return {scale: 1 / sum(run[name] for run in runs) for scale, name in micro.counted.items()}


def in_parts(
    graph: Graph, micro: MicroLoss, count: int, state: dict[str, Tensor], given: list[Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients summed over micro-batches."""
    feeds = dict(zip((*graph.inputs, *graph.targets), given, strict=True))
    batched = {n for n in feeds if graph.batch_dim(n) is not None}
    cut = {n: t.tensor_split(count) if n in batched else (t,) * count for n, t in feeds.items()}
    parts = [{n: pieces[k] for n, pieces in cut.items()} for k in range(count)]
    sizes = [len(piece) for piece in torch.arange(len(given[0])).tensor_split(count)]
    scales = {**micro.fixed, **counted(micro, sizes, state, parts)}
    assert set(scales) == set(micro.scales) == set(micro.graph.targets) - set(graph.targets)
    total, sums = 0.0, {key: torch.zeros_like(t) for key, t in state.items()}
    for size, part in zip(sizes, parts, strict=True):
        fed = {n: torch.tensor(value, dtype=torch.float64) for n, value in scales.items()}
        scalars, gradients = executed(micro.graph, size, state, part | fed)
        total += scalars[micro.graph.loss]
        for key, gradient in gradients.items():
            sums[key] += gradient
    return total, sums


def assert_adds_up(module: nn.Module, given: list[Tensor], loss: Loss | None = None, *, inputs: int = 1) -> MicroLoss:
    """The micro-batches' losses and gradients add up to eager's of the whole batch, in even and uneven parts."""
    x, targets = tuple(given[:inputs]), tuple(given[inputs:])
    graph = capture(module, x, targets, loss)
    module = module.double()
    state = {k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    wide = [t.double() if t.is_floating_point() else t for t in given]
    outputs = module(*wide[:inputs])
    expected = loss(outputs, *wide[inputs:]) if loss else mean_square(outputs)
    expected.backward()
    for count in (3, len(given[0])):
        micro = microbatch_loss(graph, len(given[0]), count)
        got, gradients = in_parts(graph, micro, count, state, wide)
        assert got == pytest.approx(expected.item(), rel=1e-12)
        for key, parameter in module.named_parameters():
            wanted = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            assert (gradients[key] - wanted).norm() <= 1e-12 * wanted.norm(), key
    return micro


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 8), nn.Linear(8, CLASSES)
        self.register_buffer("weights", torch.rand(CLASSES) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.gelu(self.one(x)))


def rows() -> Tensor:
    return torch.randn(BATCH, 6)


def labels(*shape: int, ignored: bool = False) -> Tensor:
    drawn = torch.randint(CLASSES, (BATCH, *shape))
    return torch.where(torch.rand(drawn.shape) < 0.4, -100, drawn) if ignored else drawn


CLASS_LOSSES: dict[str, Loss] = {
    "mean": F.cross_entropy,
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "none then mean": lambda y, t: F.cross_entropy(y, t, reduction="none").mean(),
    "ignore_index": lambda y, t: F.cross_entropy(y, t, ignore_index=2),
    "label smoothing": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "smoothing and ignore_index": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1, ignore_index=1),
    "nll": lambda y, t: F.nll_loss(F.log_softmax(y, -1), t),
    "nll sum": lambda y, t: F.nll_loss(F.log_softmax(y, -1), t, reduction="sum"),
    "over the batch": lambda y, t: F.cross_entropy(y, t, reduction="sum") / y.shape[0],
    "two with factors": lambda y, t: 0.3 * F.cross_entropy(y, t) - y.square().mean() / 7 + 2 * y.abs().sum(),
    "plus a number": lambda y, t: 1.5 - F.cross_entropy(y, t) + 2,
    "products summed": lambda y, t: torch.einsum("bc,bc->", y, y.tanh()) + (y.t() @ y.sin()).sum() / y.shape[0],
    "one twice": lambda y, t: (lambda loss: loss + 0.5 * loss)(F.cross_entropy(y, t)),
}


@pytest.mark.parametrize("name", CLASS_LOSSES)
def test_class_index_losses_add_up(name: str) -> None:
    assert_adds_up(Classifier(), [rows(), labels()], CLASS_LOSSES[name])


class Weighted(Classifier):
    """Gives its class weights to the loss."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.weights


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_class_weights_add_up(smoothing: float, reduction: str) -> None:
    def loss(y: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        return F.cross_entropy(y[0], t, weight=y[1], label_smoothing=smoothing, reduction=reduction)

    assert_adds_up(Weighted(), [rows(), labels(ignored=True)], loss)


def test_a_micro_batch_without_a_valid_target_adds_nothing() -> None:
    assert_adds_up(Classifier(), [rows(), torch.tensor([-100, -100, -100, 1, -100, 2, 0])], F.cross_entropy)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="before 2.13 torch fixes the batch of soft targets")
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_soft_targets_add_up(smoothing: float) -> None:
    soft = torch.randn(BATCH, CLASSES).softmax(1)
    assert_adds_up(Classifier(), [rows(), soft], lambda y, t: F.cross_entropy(y, t, label_smoothing=smoothing))


ELEMENTWISE: dict[str, Callable[..., Tensor]] = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth l1": F.smooth_l1_loss,
    "huber": lambda y, t, reduction: F.huber_loss(y, t, reduction=reduction, delta=0.7),
    "bce with logits": F.binary_cross_entropy_with_logits,
    "bce": lambda y, t, reduction: F.binary_cross_entropy(y.sigmoid(), t, reduction=reduction),
    "kl": lambda y, t, reduction: F.kl_div(y.log_softmax(1), t, reduction=reduction),
    "poisson": F.poisson_nll_loss,
    "soft margin": lambda y, t, reduction: F.soft_margin_loss(y, (t > 0.2).to(y.dtype) * 2 - 1, reduction=reduction),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_losses_add_up(name: str, reduction: str) -> None:
    target = torch.randn(BATCH, CLASSES).softmax(1)
    assert_adds_up(Classifier(), [rows(), target], lambda y, t: ELEMENTWISE[name](y, t, reduction=reduction))


def test_kl_div_over_the_batch_divides_by_the_whole_batch() -> None:
    target = torch.randn(BATCH, CLASSES).softmax(1)
    assert_adds_up(Classifier(), [rows(), target], lambda y, t: F.kl_div(y.log_softmax(1), t, reduction="batchmean"))


def test_the_stand_in_loss_adds_up() -> None:
    assert_adds_up(Classifier(), [rows()])


class TwoHeads(Classifier):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = F.gelu(self.one(x))
        return self.two(hidden), hidden


def test_the_stand_in_loss_of_two_outputs_adds_up() -> None:
    assert_adds_up(TwoHeads(), [rows()])


class Language(nn.Module):
    """Tokens to scores of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(CLASSES, 6), nn.Linear(6, CLASSES)
        self.mix = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table(x)
        return self.head(h + self.mix(h, h, h, need_weights=False)[0])


def shifted(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y[:, :-1].reshape(-1, CLASSES), t[:, 1:].reshape(-1))


def test_a_language_model_with_shifted_labels_adds_up() -> None:
    assert_adds_up(Language(), [labels(4), labels(4, ignored=True)], shifted)


def test_sequence_first_scores_add_up() -> None:
    def loss(y: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(y.transpose(0, 1).reshape(-1, CLASSES), t.t().reshape(-1))

    assert_adds_up(Language(), [labels(4), labels(4, ignored=True)], loss)


def test_segmentation_adds_up() -> None:
    module = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, CLASSES, 1))
    assert_adds_up(module, [torch.randn(BATCH, 3, 4, 5), labels(4, 5, ignored=True)], F.cross_entropy)


class Regularised(Classifier):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.one.weight.square().sum() + self.two.bias.mean()


def test_a_term_of_the_weights_alone_is_shared_out() -> None:
    micro = assert_adds_up(Regularised(), [rows(), labels()], lambda y, t: F.cross_entropy(y[0], t) + 1e-1 * y[1])
    assert 1 / BATCH in micro.fixed.values()


def test_losses_per_class_weighted_and_added_add_up() -> None:
    def loss(y: tuple[Tensor, Tensor], t: Tensor) -> Tensor:
        each = F.binary_cross_entropy_with_logits(y[0], t, reduction="none").mean(0)
        return (each * y[1]).sum()

    assert_adds_up(Weighted(), [rows(), torch.rand(BATCH, CLASSES)], loss)


def test_an_input_that_has_no_batch_dim_is_the_same_for_all() -> None:
    assert_adds_up(
        Classifier(), [rows(), torch.rand(BATCH, CLASSES), torch.rand(CLASSES)], lambda y, t, w: (w * (y - t) ** 2).mean()
    )


@pytest.mark.parametrize("strategy", ["data", "filter"])
def test_a_micro_batch_split_over_ranks_gives_the_same_share_and_count(strategy: str) -> None:
    module, x, t = Weighted().double(), rows().double(), labels(ignored=True)
    graph = capture(module, (x,), (t,), lambda y, t: F.cross_entropy(y[0], t, weight=y[1]) + y[0].square().mean())
    state = {k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    micro = microbatch_loss(graph, BATCH, 2)
    assert micro.counts is not None
    shown = replace(micro.graph, outputs=(micro.graph.loss,))
    counts = replace(micro.counts, loss=micro.counts.outputs[0])
    fed = dict(zip((*graph.inputs, *graph.targets, *micro.scales), (x[:4], t[:4], *torch.tensor([0.3, 0.7])), strict=True))
    jobs = [
        Job(
            name=name,
            graph=g,
            plan=named(how, g, ranks=2, batch=4),
            state=state,
            inputs=[fed[n] for n in (*g.inputs, *g.targets)],
        )
        for name, g, how in (("share", shown, strategy), ("counts", counts, "data"))
    ]
    done = run_jobs(jobs, 2)
    for job in jobs:
        scalars, gradients = executed(job.graph, 4, state, fed)
        assert not done[job.name].error
        assert done[job.name].outputs[job.graph.loss].item() == pytest.approx(scalars[job.graph.loss], rel=1e-12)
        for key, gradient in gradients.items():
            assert (done[job.name].gradients[key] - gradient).norm() <= 1e-12 * gradient.norm(), key


def masked(y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
    return ((y - t).square().mean(1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("whole", [False, True])
def test_a_sum_over_the_sum_of_a_mask_adds_up(whole: bool) -> None:
    mask = torch.tensor([0, 1, 1, 0, 0, 1, 1])
    micro = assert_adds_up(Classifier(), [rows(), torch.rand(BATCH, CLASSES), mask if whole else mask / 3], masked)
    assert len(micro.counted) == 1
    assert not micro.fixed


def test_a_mean_over_the_mean_of_a_mask_adds_up() -> None:
    def loss(y: Tensor, t: Tensor, mask: Tensor) -> Tensor:
        return 3 * (y - t).square().mean(1).mul(mask).mean() / mask.mean() + y.mean()

    assert_adds_up(Classifier(), [rows(), torch.rand(BATCH, CLASSES), torch.rand(BATCH)], loss)


class Mixer(nn.Module):
    """A linear layer, one function of its [B, 4, 6] result and the tables it may use."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.linear, self.table, self.slope = nn.Linear(3, 6), nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.rand(4))
        self.function = function

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.function(self, self.linear(x), ids)


def expanded_token(m: Mixer, h: Tensor, ids: Tensor) -> Tensor:
    token = m.table[:1].expand(h.shape[0], -1, -1)
    return torch.cat([token, h], 1) * torch.ones(h.shape[0], 1, 1)


def own_row(m: Mixer, h: Tensor, ids: Tensor) -> Tensor:
    return h[torch.arange(h.shape[0]), ids[:, 0] % 4]


def windows(m: Mixer, h: Tensor, ids: Tensor) -> Tensor:
    """The samples inside two other factors, and back."""
    parts = h.view(-1, 2, 2, 6).transpose(1, 2).reshape(-1, 2, 6)
    scores = (parts @ parts.transpose(1, 2)).softmax(-1)
    return (scores @ parts).view(-1, 2, 2, 6).transpose(1, 2).reshape(-1, 24)


def siamese(m: Mixer, h: Tensor, ids: Tensor) -> Tensor:
    both = torch.cat([h, m.table[ids]]).tanh()
    return both[: h.shape[0]] * both[h.shape[0] :].exp()


def causal_queries(m: Mixer, h: Tensor, ids: Tensor) -> Tensor:
    queries, table = h[:, 0][None, None], m.table[None, None]
    return F.scaled_dot_product_attention(queries, table, table, is_causal=True)


KEPT_APART: dict[str, Callable[..., Tensor]] = {
    "softmax of features": lambda m, h, i: h.softmax(-1),
    "attention": lambda m, h, i: F.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None], is_causal=True),
    "products within samples": lambda m, h, i: h @ h.transpose(1, 2),
    "einsum": lambda m, h, i: torch.einsum("btc,bsc->bts", h, h),
    "deviation of features": lambda m, h, i: (h - h.mean(1, keepdim=True)) / h.std(-1, keepdim=True),
    "cumsum, flip, roll in time": lambda m, h, i: h.cumsum(1) + h.flip(1) * h.roll(1, 1),
    "layer norm": lambda m, h, i: F.layer_norm(h, (6,)),
    "instance norm": lambda m, h, i: F.instance_norm(h),
    "look-up": lambda m, h, i: h * F.embedding(i, m.table)[:, :4],
    "indexed table": lambda m, h, i: h * m.table[i],
    "gathered": lambda m, h, i: h.gather(1, (i % 4)[..., None].expand(-1, -1, 6)),
    "own row": own_row,
    "expanded token": expanded_token,
    "windows": windows,
    "sequence first": lambda m, h, i: h.transpose(0, 1).reshape(-1, 6) @ m.table.t(),
    "repeated": lambda m, h, i: h.repeat(2, 1, 1) * 2 + h.repeat(2, 3, 1)[:, :4],
    "repeated table": lambda m, h, i: h.reshape(-1, 6)[:, :5] + m.table[:4, :5].repeat(h.shape[0], 1),
    "convolution and pool": lambda m, h, i: F.max_pool1d(F.conv1d(h, m.table[:4, :4, None]), 2),
    "pad and split": lambda m, h, i: torch.stack([*F.pad(h, (1, 1)).split(4, -1)], 1),
    "where": lambda m, h, i: torch.where(i[..., None] > 2, h, m.slope[:, None]),
    "two batches in one, sliced": siamese,
}
MIXED: dict[str, tuple[Callable[..., Tensor], str]] = {
    "gathered over the batch": (lambda m, h, i: h.gather(0, i[..., None].expand(-1, -1, 6)), "gather"),
    "indexed samples": (lambda m, h, i: h[i[:, 0]], "index"),
    "einsum over two batches": (lambda m, h, i: torch.einsum("btc,atc->ab", h, h), "einsum"),
    "covariance": (lambda m, h, i: h[:, 0].t() @ h[:, 0], "square"),
    "attention over the batch": (lambda m, h, i: F.scaled_dot_product_attention(*[h.transpose(0, 1)[None]] * 3), "attention"),
    "samples in causal order": (causal_queries, "attention"),
    "softmax over the batch, last": (lambda m, h, i: h.permute(1, 2, 0).softmax(-1), "softmax"),
    "a batch beside its pairs": (lambda m, h, i: torch.cat([h, h])[1::2], "slice"),
}


@pytest.mark.parametrize("name", KEPT_APART)
def test_ops_that_keep_samples_apart_add_up(name: str) -> None:
    ids = torch.randint(5, (BATCH, 4))
    assert_adds_up(Mixer(KEPT_APART[name]), [torch.randn(BATCH, 4, 3), ids], inputs=2)


@pytest.mark.parametrize("name", MIXED)
def test_ops_that_let_samples_meet_are_refused(name: str) -> None:
    function, op = MIXED[name]
    graph = capture(Mixer(function), (torch.randn(BATCH, 4, 3), torch.randint(5, (BATCH, 4))))
    assert graph.batch is None
    with pytest.raises(Infeasible, match=rf"{op}.*so the loss is not a sum over micro-batches; use 1 micro-batch"):
        microbatch_loss(graph, BATCH, 2)


def test_one_micro_batch_changes_nothing() -> None:
    graph = graph_of("gpt2")
    micro = microbatch_loss(graph, 4, 1)
    assert micro.graph is graph
    assert micro.scales == ()
    assert micro.counts is None


@pytest.mark.parametrize("name", SMALL)
def test_every_built_in_model_is_accepted(name: str) -> None:
    graph = graph_of(name)
    micro = microbatch_loss(graph, batch_of(name), 2)
    lower(micro.graph, Plan(graph=micro.graph.hash, batch=2, mesh=Mesh.of(data=1)))
    normed = any(op.target.startswith("aten.batch_norm") for op in graph.ops)
    assert [note for note in micro.notes if note.startswith("batch norm (")] == list(micro.notes[:normed])
    assert bool(micro.notes) == normed


@pytest.mark.parametrize("name", ["vgg16-cifar", "cosmoflow", "gnmt", "gpt2"])
def test_built_in_models_without_batch_norm_add_up(name: str) -> None:
    module, inputs, targets, loss = MODELS[name](**SMALL[name])
    assert_adds_up(module, [*inputs, *targets], loss, inputs=len(inputs))


REFUSED: dict[str, tuple[Loss, str]] = {
    "products across the batch": (lambda y: (y @ y.T).mean(), "matmul"),
    "differences across the batch": (lambda y: (y[:, None] - y[None]).square().mean(), "sub"),
    "softmax over the batch": (lambda y: y.softmax(0).square().sum(), "softmax"),
    "cumsum over the batch": (lambda y: y.cumsum(0).mean(), "cumsum"),
    "sort over the batch": (lambda y: (y.sort(0)[0] * y).mean(), "sort"),
    "max over the batch": (lambda y: y.amax(0).sum(), "amax"),
    "deviation over the batch": (lambda y: y.std(0).sum(), "std"),
    "norm over the batch": (lambda y: y.norm(), "norm"),
    "rolled batch": (lambda y: (y.roll(1, 0) * y).mean(), "roll"),
    "flipped batch": (lambda y: (y.flip(0) * y).mean(), "flip"),
    "batch mean subtracted": (lambda y: (y - y.mean(0)).square().mean(), "mean"),
    "root of the loss": (lambda y: y.square().mean().sqrt(), "sqrt"),
    "product of two sums": (lambda y: y.mean() * y.square().mean(), "mul"),
    "a sum over another": (lambda y: y.mean() / y.square().mean(), "div"),
    "the first sample": (lambda y: y[0].sum(), "select"),
    "the first two samples": (lambda y: y[:2].square().mean(), "slice"),
    "the batch size as a number": (lambda y: (y * y.shape[0]).tanh().mean(), "mul"),
    "places in the batch": (lambda y: (y * torch.arange(y.shape[0])[:, None]).mean(), "mul"),
    "no rule": (lambda y: y.cummax(1)[0].sum(), r"cummax \(aten.cummax.default\) has no rule"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_loss_that_mixes_samples_is_refused(name: str) -> None:
    loss, op = REFUSED[name]
    graph = capture(Classifier(), (rows(),), (), loss)
    assert graph.batch is None
    with pytest.raises(Infeasible, match=rf"{op}.*so the loss is not a sum over micro-batches; use 1 micro-batch"):
        microbatch_loss(graph, BATCH, 2)


def test_a_view_that_scrambles_samples_is_refused() -> None:
    """[B, 4] laid out flat and read as [4, B] has the right size, and rows of several samples; as [B, 2, 2] it is fine."""
    shapes = {"x": (Size(1, 0), 4), "flat": (Size(4, 0),), "back": (Size(1, 0), 2, 2), "wrong": (4, Size(1, 0))}
    values = {name: TensorSpec(shape, "float32") for name, shape in shapes.items()} | {"loss": TensorSpec((), "float32")}

    def seen_as(name: str) -> Graph:
        chain = [("flat", "view", "x"), (name, "view", "flat"), ("loss", "mean", name)]
        ops = tuple(
            Op(name=made, target=f"aten.{kind}.default", args=(Ref(read), *((shapes[made],) if kind == "view" else ())),
               kwargs={}, results=(made,), module="")
            for made, kind, read in chain
        )  # fmt: skip
        return Graph(values=values, inputs=("x",), targets=(), parameters=(), constants=(), ops=ops, loss="loss", outputs=())

    assert microbatch_loss(seen_as("back"), 4, 2).fixed == {"loss_scale": 1 / 16}
    with pytest.raises(Infeasible, match="wrong mixes samples"):
        microbatch_loss(seen_as("wrong"), 4, 2)


def test_targets_the_network_decides_are_refused() -> None:
    graph = capture(Classifier(), (rows(),), (), lambda y: F.cross_entropy(y, y.argmax(1)))
    with pytest.raises(Infeasible, match=r"cross_entropy_loss divides by a number of targets that the network itself decides"):
        microbatch_loss(graph, BATCH, 2)


def test_sums_over_several_counts_are_refused() -> None:
    graph = capture(Classifier(), (rows(),), (torch.rand(BATCH, CLASSES),), lambda y, t: (y.sum(0) / t.sum(0)).sum())
    with pytest.raises(Infeasible, match=r"div \(aten\.div\.Tensor\) is not linear in a sum over the batch"):
        microbatch_loss(graph, BATCH, 2)


def test_a_fixed_batch_is_refused() -> None:
    graph = capture(Classifier(), (rows(),), (), fixed=True)
    with pytest.raises(Infeasible, match=r"fixes its batch at 7, so 2 micro-batches"):
        microbatch_loss(graph, BATCH, 2)


def test_batch_norm_is_as_on_one_device_with_the_same_micro_batches() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(24, CLASSES)).double()
    x, t = torch.randn(BATCH, 3, 4, 5).double(), labels(ignored=True)
    graph = capture(module, (x,), (t,), F.cross_entropy)
    micro = microbatch_loss(graph, BATCH, 3)
    assert micro.notes == (
        "batch norm (1) takes its statistics per micro-batch, as one device with the same micro-batches would",
    )
    state = {k: v.detach().clone() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    got, gradients = in_parts(graph, micro, 3, state, [x, t])
    parts = zip(x.tensor_split(3), t.tensor_split(3), strict=True)
    expected = sum(F.cross_entropy(module(part), labels, reduction="sum") for part, labels in parts) / (t != -100).sum()
    expected.backward()
    assert got == pytest.approx(expected.item(), rel=1e-12)
    for key, parameter in module.named_parameters():
        assert (gradients[key] - parameter.grad).norm() <= 1e-12 * max(parameter.grad.norm(), 1e-3), key


def test_noise_in_the_weights_and_running_instance_norms_are_noted() -> None:
    class Noisy(Classifier):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(F.dropout(x, 0.1), F.dropout(self.one.weight, 0.1))

    assert [note.split(" per ")[0] for note in microbatch_loss(capture(Noisy(), (rows(),)), BATCH, 2).notes] == [
        "noise that all samples share (dropout_1) is drawn"
    ]
    tracked = nn.InstanceNorm1d(4, track_running_stats=True)
    (note,) = microbatch_loss(capture(tracked, (torch.randn(BATCH, 4, 3),)), BATCH, 2).notes
    assert "updates its running statistics per micro-batch" in note


def test_batch_norm_without_values_to_norm_is_refused() -> None:
    graph = capture(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)), (rows(),))
    assert microbatch_loss(graph, BATCH, 3).notes
    with pytest.raises(
        Infeasible, match=r"1\.batch_norm would take its statistics of 1 value per channel in a micro-batch of 1"
    ):
        microbatch_loss(graph, BATCH, 4)


def test_a_size_of_the_batch_that_is_written_to_a_buffer_too_reaches_the_loss_whole() -> None:
    class Sized(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("size", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weights.sum() * x.shape[0]
            self.size.copy_(weight)
            return super().forward(x).square().mean() + weight

    assert_adds_up(Sized(), [rows()], lambda output: output)


class Counter(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        return super().forward(x) * self.steps


def test_a_buffer_that_changes_and_reaches_the_loss_is_refused() -> None:
    graph = capture(Counter(), (rows(),))
    with pytest.raises(Infeasible, match=r"buffer steps changes with every micro-batch"):
        microbatch_loss(graph, BATCH, 2)


class Reporting(Classifier):
    """Returns its loss, as some do, and the batch's mean."""

    def forward(self, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = super().forward(x)
        return F.cross_entropy(y, t), y, y.mean(0)


def test_outputs_that_mix_samples_are_dropped_and_said() -> None:
    micro = assert_adds_up(Reporting(), [rows(), labels()], lambda y: y[0] * 2, inputs=2)
    assert len(micro.graph.outputs) == 1
    assert micro.notes == ("outputs that mix samples are not given under micro-batches: cross_entropy_loss, mean",)


class Averaging(Classifier):
    """Tracks the mean that its loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        mean = super().forward(x).square().mean()
        self.average.mul_(0.9).add_(mean.detach())
        return mean


def test_a_buffer_that_tracks_the_loss_keeps_its_own_mean() -> None:
    micro = assert_adds_up(Averaging(), [rows()], lambda y: 3 * y)
    (write,) = micro.graph.writes
    assert "aten.mean.default" in {op.target for op in micro.graph.ops}
    assert write[1] in micro.graph.producer


def test_whole_numbers_beside_the_loss_are_shared_out() -> None:
    assert_adds_up(Classifier(), [rows()], lambda y: y.mean() + torch.tensor(3) * y.shape[0])


def test_the_graph_stays_open_in_the_batch() -> None:
    graph = graph_of("gpt2")
    micro = microbatch_loss(graph, 4, 2)
    assert micro.graph.batch is None
    assert micro.graph.targets[: len(graph.targets)] == graph.targets
    assert any(isinstance(size, Size) for size in micro.graph.values[graph.inputs[0]].shape)
    assert {n for op in micro.graph.ops for n in (*op.operands, *op.results)} <= set(micro.graph.values)
