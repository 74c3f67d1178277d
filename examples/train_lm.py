"""Trains a small language model whose feed-forward layers are all `mok_jax.MoKMoE`, on CPU devices or any other.

The model is a causal transformer over bytes; the text is the Python standard library's own source,
so nothing is downloaded. One jitted step runs over a (data, expert) mesh: the batch is split over
both axes, the experts over the second, everything else is replicated.

    python -m pip install '.[examples]'
    python examples/train_lm.py                  # 8 virtual CPU devices, about 3 minutes on two cores
    python examples/train_lm.py --precision mxfp8  # the experts multiply in MXFP8
    python examples/train_lm.py --help           # every setting and its default

It prints the text's byte entropies, the loss as it falls, and the final validation loss, which ends
below the entropy of a byte given the one before it. It writes loss.png and load.png to --out.
"""

import argparse
import dataclasses
import math
import os
import pathlib
import sys
import sysconfig
import time
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from matplotlib.figure import Figure
from tqdm import tqdm

import mok_jax

CPU_DEVICES = 8
HEAD_WIDTH = 32
BYTES = 256
BALANCE_COEFFICIENT = 1e-2
Z_COEFFICIENT = 1e-3
VALIDATION_SHARE = 20  # one file in so many
PRECISIONS = {  # of the MoE layers: options of MoKMoE
    "float32": {},
    "bfloat16": dict(dtype=jnp.bfloat16),
    "mxfp8": dict(dtype=jnp.bfloat16, config=mok_jax.MoKConfig(precision="mxfp8")),
}


def _setting(default, text):
    return dataclasses.field(default=default, metadata={"help": text})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line sets; the defaults end below the bigram entropy in under 5 minutes on two cores."""

    implementation: str | None = _setting(
        None, "cuda, host, xla or reference; without it the best that the devices allow"
    )
    precision: str = _setting("float32", f"in which the MoE layers multiply: {', '.join(PRECISIONS)}")
    mesh: str | None = _setting(None, "data x expert devices, as 2x4; without it 2x4 on a CPU, else all devices")
    steps: int = _setting(400, "training steps")
    batch: int = _setting(32, "sequences in a step")
    sequence: int = _setting(128, "bytes in a sequence")
    layers: int = _setting(3, "transformer blocks")
    hidden: int = _setting(128, f"width of the model, a multiple of {HEAD_WIDTH}")
    intermediate: int = _setting(256, "width of one expert")
    experts: int = _setting(8, "experts in a layer")
    top_k: int = _setting(2, "experts that a byte goes to")
    learning_rate: float = _setting(3e-3, "peak of the schedule")
    validate_every: int = _setting(50, "steps between validation losses")
    validation_batches: int = _setting(16, "batches in the final validation loss; a quarter of them in the others")
    seed: int = _setting(0, "of the initial weights and the order of the text")
    out: str = _setting("out", "folder for loss.png and load.png")


# ---- the model ----


class Attention(nnx.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, hidden: int, rngs: nnx.Rngs):
        self.project = nnx.Linear(hidden, 3 * hidden, use_bias=False, rngs=rngs)
        self.out = nnx.Linear(hidden, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.project(x).reshape(*x.shape[:2], 3, -1, HEAD_WIDTH)
        query, key, value = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
        mixed = jax.nn.dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
        return self.out(mixed.reshape(x.shape))


def _rotate(x: jax.Array) -> jax.Array:
    """Turns each pair of channels by an angle that grows with the position; x: [batch, sequence, heads, width]."""
    half = x.shape[-1] // 2
    frequency = 1e4 ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = (jnp.arange(x.shape[1], dtype=x.dtype)[:, None] * frequency)[:, None, :]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), a * jnp.sin(angle) + b * jnp.cos(angle)], axis=-1)


class Block(nnx.Module):
    """Attention and a mixture of experts, each added to its input."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        self.attention_norm = nnx.RMSNorm(settings.hidden, rngs=rngs)
        self.attention = Attention(settings.hidden, rngs)
        self.ffn_norm = nnx.RMSNorm(settings.hidden, rngs=rngs)
        self.ffn = mok_jax.MoKMoE(
            settings.hidden,
            settings.intermediate,
            settings.experts,
            settings.top_k,
            implementation=settings.implementation,
            rngs=rngs,
            **PRECISIONS[settings.precision],
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class LanguageModel(nnx.Module):
    """Logits of the next byte at every position; tokens: int32 [batch, sequence]."""

    def __init__(self, settings: Settings, rngs: nnx.Rngs):
        self.embed = nnx.Embed(BYTES, settings.hidden, rngs=rngs)
        self.blocks = nnx.List([Block(settings, rngs) for _ in range(settings.layers)])
        self.norm = nnx.RMSNorm(settings.hidden, rngs=rngs)
        self.head = nnx.Linear(settings.hidden, BYTES, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _byte_loss(model: LanguageModel, text: jax.Array):
    """Mean loss in nats per byte, and what the MoE layers recorded; text: int32 [batch, sequence + 1]."""
    logits, recorded = nnx.capture(model, nnx.Intermediate)(text[:, :-1])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    def per_layer(name):
        layers = (recorded["blocks"][i]["ffn"][name] for i in range(len(model.blocks)))
        return jnp.stack([jax.tree.leaves(layer)[0] for layer in layers])

    return loss, per_layer


def make_steps(settings: Settings):
    """The state of training, and the two jitted functions over it; call it under `jax.set_mesh`."""
    model = LanguageModel(settings, nnx.Rngs(settings.seed))
    warm_up = max(1, settings.steps // 20)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, settings.learning_rate, warm_up, max(settings.steps, warm_up + 1), settings.learning_rate / 20
    )
    update = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, update, wrt=nnx.Param)
    definition, state = nnx.split((model, optimizer))

    def train_step(state, text):
        model, optimizer = nnx.merge(definition, state)

        def total_loss(model):
            loss, per_layer = _byte_loss(model, text)
            balance, z = per_layer("load_balance_loss").sum(), per_layer("router_z_loss").sum()
            total = loss + BALANCE_COEFFICIENT * balance + Z_COEFFICIENT * z
            return total, (loss, per_layer("tokens_per_expert"))

        gradients, (loss, load) = nnx.grad(total_loss, has_aux=True)(model)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss, load

    def validation_loss(state, text):
        model, _ = nnx.merge(definition, state)
        return _byte_loss(model, text)[0]

    return state, jax.jit(train_step, donate_argnums=0), jax.jit(validation_loss)


# ---- the text ----


def read_text() -> tuple[np.ndarray, np.ndarray]:
    """The standard library's sources without its tests, split by file: training and validation bytes, uint8."""
    root = pathlib.Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if not skipped.intersection(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % VALIDATION_SHARE == 0
            parts[held_out].append(path.read_bytes())
    train, validation = (np.frombuffer(b"".join(files), np.uint8) for files in parts)
    print(
        f"text: {root}, {len(parts[0])} files of {train.size:,} bytes to train on, "
        f"{len(parts[1])} files of {validation.size:,} bytes to validate on"
    )
    return train, validation


def entropies(text: np.ndarray) -> tuple[float, float]:
    """The empirical entropy of a byte, and of a byte given the one before it, in nats."""

    def entropy(counts):
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    pairs = np.bincount(text[:-1].astype(np.int64) * BYTES + text[1:], minlength=BYTES * BYTES)
    return entropy(np.bincount(text)), entropy(pairs) - entropy(pairs.reshape(BYTES, BYTES).sum(axis=1))


def windows(text: np.ndarray, starts: np.ndarray, sequence: int) -> np.ndarray:
    """int32 [starts, sequence + 1]: each input and, one further, its targets."""
    return text[starts[:, None] + np.arange(sequence + 1)].astype(np.int32)


# ---- the run ----


def train(settings: Settings, mesh: Mesh) -> None:
    """Trains, prints and draws."""
    training_text, validation_text = read_text()
    for name, text in (("training", training_text), ("validation", validation_text)):
        if text.size <= settings.sequence:
            sys.exit(f"train_lm: --sequence must be below the {text.size} {name} bytes, got {settings.sequence}")
    unigram, bigram = entropies(np.concatenate([training_text, validation_text]))
    print(f"entropy of a byte, over all the text: {_show(unigram)}")
    print(f"entropy of a byte given the one before it: {_show(bigram)}")

    state, train_step, validation_loss = make_steps(settings)
    by_batch = NamedSharding(mesh, P(mesh.axis_names))
    last_start = validation_text.size - settings.sequence - 1

    def validate(batches):
        starts = np.linspace(0, last_start, batches * settings.batch).astype(np.int64)
        texts = windows(validation_text, starts, settings.sequence).reshape(batches, settings.batch, -1)
        return float(np.mean([float(validation_loss(state, jax.device_put(text, by_batch))) for text in texts]))

    order = np.random.default_rng(settings.seed)
    losses, loads, validation = [], [], []
    bytes_in_step = settings.batch * settings.sequence
    with tqdm(total=settings.steps, unit="step", mininterval=1.0, dynamic_ncols=True) as bar:
        for step in range(1, settings.steps + 1):
            starts = order.integers(training_text.size - settings.sequence, size=settings.batch)
            text = jax.device_put(windows(training_text, starts, settings.sequence), by_batch)
            began = time.perf_counter()
            # Careful: await each step. XLA's CPU devices can hang with many programs in flight on few cores.
            state, loss, load = jax.block_until_ready(train_step(state, text))
            speed = bytes_in_step / (time.perf_counter() - began)
            losses.append(float(loss))
            loads.append(np.asarray(load))
            if step == settings.steps:
                validation.append((step, validate(settings.validation_batches)))
            elif step % settings.validate_every == 0:
                validation.append((step, validate(max(1, settings.validation_batches // 4))))
            held_out = f"{validation[-1][1]:.3f}" if validation else "-"
            bar.set_postfix_str(f"loss {losses[-1]:.3f}, validation {held_out}, {speed:,.0f} tokens/s", refresh=False)
            bar.update()
        seconds = bar.format_dict["elapsed"]

    print(f"{settings.steps} steps in {seconds:.0f} s, {settings.steps * bytes_in_step / seconds:,.0f} tokens/s")
    final = validation[-1][1]
    side = "below" if final < bigram else "not below"
    print(f"final validation loss: {_show(final)}, {side} the entropy given the byte before ({bigram:.3f})")
    out = pathlib.Path(settings.out)
    out.mkdir(parents=True, exist_ok=True)
    draw_losses(out / "loss.png", losses, validation, unigram, bigram)
    draw_load(out / "load.png", np.stack(loads))


def _show(nats: float) -> str:
    return f"{nats:.3f} nats ({nats / math.log(2):.3f} bits) per byte"


# ---- the pictures ----


def draw_losses(path: pathlib.Path, losses: list[float], validation, unigram: float, bigram: float) -> None:
    """The loss of every training step beside the validation losses and the text's entropies."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses, color="tab:blue", linewidth=0.8, label="training")
    axes.plot(*zip(*validation, strict=True), color="tab:orange", marker="o", markersize=4, label="validation")
    axes.axhline(unigram, color="0.6", linestyle=":", label="entropy of a byte")
    axes.axhline(bigram, color="0.3", linestyle="--", label="entropy given the byte before")
    axes.set(title="Byte-level language model, all FFNs MoKMoE", xlabel="step", ylabel="nats per byte")
    axes.legend()
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


def draw_load(path: pathlib.Path, loads: np.ndarray) -> None:
    """Each expert's share of the routes, relative to a balanced one; loads: [steps, layers, experts]."""
    relative = loads * loads.shape[-1] / np.maximum(loads.sum(axis=-1, keepdims=True), 1)
    figure = Figure(figsize=(8, 1 + 1.5 * loads.shape[1]), layout="constrained")
    rows = figure.subplots(loads.shape[1], sharex=True, squeeze=False)[:, 0]
    for layer, axes in enumerate(rows):
        extent = (0.5, loads.shape[0] + 0.5, loads.shape[2] - 0.5, -0.5)
        image = axes.imshow(
            relative[:, layer].T, aspect="auto", interpolation="nearest", cmap="PuOr_r", vmin=0, vmax=2, extent=extent
        )
        axes.set_ylabel(f"layer {layer}\nexpert")
    rows[0].set_title("Expert load: tokens of each expert, 1 = balanced")
    rows[-1].set_xlabel("step")
    figure.colorbar(image, ax=list(rows), extend="max")
    figure.savefig(path, dpi=120)
    print(f"wrote {path}")


# ---- the command line ----


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage


def parse(arguments: list[str] | None = None) -> tuple[Settings, Mesh]:
    """The settings and the mesh; a wrong one ends the program with one line."""
    head = __doc__.splitlines()[0]
    parser = _Parser(prog="train_lm", description=head, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in dataclasses.fields(Settings):
        kind = str if field.default is None else type(field.default)
        parser.add_argument(
            "--" + field.name.replace("_", "-"),
            type=kind,
            default=field.default,
            metavar=kind.__name__.upper() if field.default is not None else field.name.upper(),
            help=field.metadata["help"],
        )
    settings = Settings(**vars(parser.parse_args(arguments)))
    try:
        mesh = make_mesh(settings)
        check(settings, mesh)
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    return settings, mesh


def make_mesh(settings: Settings) -> Mesh:
    """The (data, expert) mesh over all devices; makes the CPU devices that the caller did not ask for himself."""
    shape = None
    if settings.mesh is not None:
        sizes = settings.mesh.split("x")
        if len(sizes) != 2 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"--mesh must be two sizes >= 1, data x expert, as 2x4, got {settings.mesh!r}")
        shape = (int(sizes[0]), int(sizes[1]))
    chosen_by_user = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if not chosen_by_user and jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", math.prod(shape) if shape else CPU_DEVICES)
    count = jax.device_count()
    if shape is None:
        expert = math.gcd(count, settings.experts, 4)
        shape = (count // expert, expert)
    if math.prod(shape) != count:
        raise ValueError(f"--mesh must have as many devices as there are, {count}, got {settings.mesh}")
    return jax.make_mesh(shape, ("data", "expert"), axis_types=(AxisType.Auto, AxisType.Auto))


def check(settings: Settings, mesh: Mesh) -> None:
    """Raises ValueError for settings that cannot run on the mesh."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        least = 0 if field.name == "seed" else 1
        flag = "--" + field.name.replace("_", "-")
        if isinstance(value, int) and value < least:
            raise ValueError(f"{flag} must be at least {least}, got {value}")
    if not (math.isfinite(settings.learning_rate) and settings.learning_rate > 0):
        raise ValueError(f"--learning-rate must be a finite number > 0, got {settings.learning_rate}")
    for flag, value, divisor, of in (
        ("--hidden", settings.hidden, HEAD_WIDTH, "the head's width"),
        ("--batch", settings.batch, mesh.size, "the number of devices"),
        ("--experts", settings.experts, mesh.shape["expert"], "the mesh's expert axis"),
    ):
        if value % divisor:
            raise ValueError(f"{flag} must be a multiple of {divisor}, {of}, got {value}")
    if settings.precision not in PRECISIONS:
        raise ValueError(f"--precision must be one of {', '.join(PRECISIONS)}, got {settings.precision!r}")
    if settings.top_k > settings.experts:
        raise ValueError(f"--top-k must be at most --experts {settings.experts}, got {settings.top_k}")
    mok_jax.choose_implementation(settings.implementation, mesh, mesh.shape["expert"])


def main(arguments: list[str] | None = None) -> None:
    """Runs the program."""
    settings, mesh = parse(arguments)
    chosen = mok_jax.choose_implementation(settings.implementation, mesh, mesh.shape["expert"])
    platform = mesh.devices.flat[0].platform
    print(f"{chosen!r} on {dict(mesh.shape)} {platform} devices, jax {jax.__version__}")
    with jax.set_mesh(mesh):
        train(settings, mesh)


if __name__ == "__main__":
    main()
