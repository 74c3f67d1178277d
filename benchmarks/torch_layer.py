"""The torch rivals of bench_layer.py, which runs this in a process of its own; prints or writes one line of JSON.

    python benchmarks/torch_layer.py --shape S1

"torch_tuned" is a layer on `torch._grouped_mm` tuned by hand: sort by expert, gather, gate and up as one product,
a Triton kernel for silu(g)*u*w and one for its gradient with <dh', h>, and a sum over each token's rows by
gathering. "torch_compile" is the same in plain torch under torch.compile, which writes those kernels itself; its
gathers have each other as gradients, so that nothing is scattered. "matmul" is the limit in this process. Both
are first compared with a loop over the experts in float32 on some of the tokens. Only torch's public names and
`torch._grouped_mm` are used; read at torch 2.11.
"""

import argparse
import functools
import json
import pathlib
import traceback
from typing import Any

import torch
from protocol import BOUNDS, CHECKED_TOKENS, DIRECTIONS, LIMIT, SHAPES, TENSORS, Shape, both_orders, route, steady

try:
    import torch_kernels as kernels
except ImportError:  # no Triton: then in plain torch, to check the rest on a CPU
    kernels = None  # type: ignore[assignment]

grouped = torch._grouped_mm


def sort_rows(ids, experts):
    """By expert: the token of each row, the row of each route [T, K], and where each expert's rows end, int32."""
    experts_of_rows, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(experts_of_rows, torch.arange(1, experts + 1, device=ids.device), out_int32=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=ids.device)
    return order, order // ids.shape[1], places.view(ids.shape), ends


def swiglu(gate_up, weights):
    """w * silu(g) * u, rounded once."""
    gate, up = gate_up.float().chunk(2, dim=1)
    return (torch.nn.functional.silu(gate) * up * weights[:, None]).to(gate_up.dtype)


def swiglu_gradient(gate_up, weights, d_weighted):
    """d_gate_up, dw = <dh', h>, and w * h again."""
    gate, up = gate_up.float().chunk(2, dim=1)
    d_h = d_weighted.float()
    sigmoid = torch.sigmoid(gate)
    h = gate * sigmoid * up
    d_gate = d_h * up * sigmoid * (1 + gate * (1 - sigmoid)) * weights[:, None]
    d_up = d_h * gate * sigmoid * weights[:, None]
    d_gate_up = torch.cat([d_gate, d_up], dim=1).to(gate_up.dtype)
    return d_gate_up, (d_h * h).sum(1), (h * weights[:, None]).to(gate_up.dtype)


def sum_of_rows(rows, places):
    """[M, H] -> [T, H], by gathering."""
    return rows[places].float().sum(1).to(rows.dtype)


class Tuned(torch.autograd.Function):
    """The layer tuned by hand: (ids, x, router_weights, w_gate_up [E, H, 2I], w_down) -> y."""

    @staticmethod
    def forward(ctx, ids, x, router_weights, w_gate_up, w_down):
        order, tokens, places, ends = sort_rows(ids, w_down.shape[0])
        rows, weights = x[tokens], router_weights.flatten()[order]
        gate_up = grouped(rows, w_gate_up, ends)
        out = grouped(stages(x).swiglu(gate_up, weights), w_down, ends)
        ctx.save_for_backward(tokens, places, ends, rows, weights, gate_up, w_gate_up, w_down)
        return stages(x).sum_of_rows(out, places)

    @staticmethod
    def backward(ctx, d_y):
        tokens, places, ends, rows, weights, gate_up, w_gate_up, w_down = ctx.saved_tensors
        d_out = d_y[tokens]
        d_weighted = grouped(d_out, w_down.mT, ends)
        d_gate_up, d_weights, weighted = stages(d_y).swiglu_gradient(gate_up, weights, d_weighted)
        d_x = stages(d_y).sum_of_rows(grouped(d_gate_up, w_gate_up.mT, ends), places)
        d_w_gate_up = grouped(rows.mT, d_gate_up, ends)
        d_w_down = grouped(weighted.mT, d_out, ends)
        return None, d_x, d_weights[places], d_w_gate_up, d_w_down


def stages(tensor):
    """Where swiglu, its gradient and sum_of_rows come from."""
    return kernels if kernels is not None and tensor.is_cuda else Plain


class Plain:
    """The stages in plain torch."""

    swiglu = staticmethod(swiglu)
    swiglu_gradient = staticmethod(swiglu_gradient)
    sum_of_rows = staticmethod(sum_of_rows)


class Gather(torch.autograd.Function):
    """x[tokens], whose gradient is the sum of the rows."""

    @staticmethod
    def forward(ctx, x, tokens, places):
        ctx.save_for_backward(places)
        return x[tokens]

    @staticmethod
    def backward(ctx, d_rows):
        return sum_of_rows(d_rows, *ctx.saved_tensors), None, None


class Combine(torch.autograd.Function):
    """The sum of the rows, whose gradient is dy[tokens]."""

    @staticmethod
    def forward(ctx, rows, tokens, places):
        ctx.save_for_backward(tokens)
        return sum_of_rows(rows, places)

    @staticmethod
    def backward(ctx, d_y):
        return d_y[ctx.saved_tensors[0]], None, None


class Permute(torch.autograd.Function):
    """weights.flatten()[order], whose gradient is a gather too."""

    @staticmethod
    def forward(ctx, weights, order, places):
        ctx.save_for_backward(places)
        return weights.flatten()[order]

    @staticmethod
    def backward(ctx, d_weights):
        return d_weights[ctx.saved_tensors[0]], None, None


def plain_layer(ids, x, router_weights, w_gate_up, w_down):
    """What torch.compile gets: autograd through the products, no scatter."""
    order, tokens, places, ends = sort_rows(ids, w_down.shape[0])
    gate_up = grouped(Gather.apply(x, tokens, places), w_gate_up, ends)
    weighted = swiglu(gate_up, Permute.apply(router_weights, order, places))
    return Combine.apply(grouped(weighted, w_down, ends), tokens, places)


def matmuls(ids, rows, h, w_gate_up, w_down):
    """The limit: nothing but the layer's products, all rows through one expert."""
    del ids
    return rows @ w_gate_up, h @ w_down


LAYERS = {
    LIMIT: lambda: matmuls,
    "torch_tuned": lambda: Tuned.apply,
    "torch_compile": lambda: torch.compile(plain_layer, fullgraph=True, dynamic=False),
}


# ---- data, agreement, time ----


def make_problem(shape: Shape, routing: str, device: str):
    """(ids, arguments, dy) of a layer: N(0, 1) tokens, 1/sqrt(fan-in) weights."""
    generator = torch.Generator(device).manual_seed(0)
    dtype = getattr(torch, shape.dtype)

    def normal(*sizes, scale=1.0):
        return torch.randn(sizes, generator=generator, device=device, dtype=torch.float32).mul_(scale).to(dtype)

    hidden, width = shape.hidden, shape.intermediate
    ids, weights = (torch.from_numpy(array).to(device) for array in route(shape, routing))
    x, d_y = normal(shape.tokens, hidden), normal(shape.tokens, hidden)
    # An expert at a time: the float32 of all of them need not fit.
    w_gate_up = torch.stack([normal(hidden, 2 * width, scale=hidden**-0.5) for _ in range(shape.experts)])
    w_down = torch.stack([normal(width, hidden, scale=width**-0.5) for _ in range(shape.experts)])
    layer = ids, [t.requires_grad_() for t in (x, weights, w_gate_up, w_down)], d_y
    sizes = [(shape.rows, hidden), (shape.rows, width), (hidden, 2 * width), (width, hidden)]
    limit = [normal(*s).requires_grad_() for s in sizes]
    return layer, (ids, limit, (normal(shape.rows, 2 * width), normal(shape.rows, hidden)))


def both(function, ids, arguments, d_y):
    """y and every gradient."""
    y = function(ids, *arguments)
    return y, *torch.autograd.grad(y, arguments, d_y)


def forward(function, ids, arguments, d_y):
    """y alone."""
    del d_y
    with torch.no_grad():
        return function(ids, *arguments)


PASSES = dict(zip(DIRECTIONS, (forward, both), strict=True))


def reference(ids, x, router_weights, w_gate_up, w_down):
    """A loop over the experts in float32; g, u, h and o are not rounded."""
    y = torch.zeros(x.shape, device=x.device)
    for expert, (gate_up, down) in enumerate(zip(w_gate_up, w_down, strict=True)):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[tokens].float() @ gate_up.float()).chunk(2, dim=1)
        out = (torch.nn.functional.silu(gate) * up) @ down.float()
        y = y.index_add(0, tokens, out * router_weights[tokens, slots, None])
    return y.to(x.dtype)


def split(results):
    """y, dx, dw, d_gate, d_up, d_down."""
    y, d_x, d_weights, d_gate_up, d_down = results
    return y, d_x, d_weights, *d_gate_up.chunk(2, dim=2), d_down


def check(name, shape, results, wanted) -> dict[str, float]:
    """Each tensor's largest relative error; raises ValueError beyond the dtype's bound."""
    errors = {}
    for tensor, value, exact in zip(TENSORS, split(results), split(wanted), strict=True):
        axes = (1, 2) if exact.ndim == 3 else tuple(range(exact.ndim))
        difference = (value[: exact.shape[0]].float() - exact.float()).abs().amax(axes)
        size = exact.float().abs().amax(axes)
        relative = torch.where(difference == 0, 0.0, difference / size)
        errors[tensor] = relative.max().item() if value.isfinite().all() else float("nan")
        if not errors[tensor] <= BOUNDS[shape.dtype]:
            raise ValueError(f"{name}: {tensor} must be within {BOUNDS[shape.dtype]}, got {errors[tensor]:.2e}")
    return errors


def sampler(function, pass_, problem, device):
    """One contender for `both_orders`."""

    def queue(calls):
        for _ in range(calls):
            pass_(function, *problem)
        if device == "cpu":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    return functools.partial(steady, queue, lambda event: event and event.synchronize())


def main() -> None:
    """Checks, times, and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, help="instead of the sizes")
    parser.add_argument("--sizes", type=json.loads, help="a JSON object of Shape's fields")
    parser.add_argument("--routing", default="uniform")
    parser.add_argument("--contenders", default=",".join(LAYERS))
    parser.add_argument("--json", help="write there instead of printing")
    options = parser.parse_args()
    shape = SHAPES[options.shape] if options.shape else Shape(**options.sizes)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer, limit = make_problem(shape, options.routing, device)
    ids, arguments, d_y = layer
    few = min(shape.tokens, CHECKED_TOKENS)
    d_few = torch.where(torch.arange(shape.tokens, device=device)[:, None] < few, d_y, 0)
    slices = [argument[:few] for argument in arguments[:2]]
    wanted = both(reference, ids[:few], [*slices, *arguments[2:]], d_y[:few])
    report: dict[str, Any] = {"agreement": {}, "left_out": {}, "torch": torch.__version__}
    functions = {}
    for name in options.contenders.split(","):
        try:
            functions[name] = LAYERS[name]()
            if name != LIMIT:
                results = both(functions[name], ids, arguments, d_few)
                report["agreement"][name] = check(name, shape, results, wanted)
        except Exception as error:
            traceback.print_exc()
            report["left_out"][name] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            functions.pop(name, None)
    del wanted, d_few
    for direction, pass_ in PASSES.items():
        samples = {
            name: sampler(function, pass_, limit if name == LIMIT else layer, device)
            for name, function in functions.items()
        }
        report[direction] = both_orders(samples)
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(report))
    else:
        print(json.dumps(report))


if __name__ == "__main__":
    main()
