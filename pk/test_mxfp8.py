"""The MXFP8 codec, in jnp and in C++, against ml_dtypes: every bfloat16 value, scales, special values, short blocks."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from cases import GPU, assert_same_bits, on_device, refuse
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mok_jax
from mok_jax import ops

BFLOAT16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
EVERY = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)


quiet = np.errstate(divide="ignore", invalid="ignore", over="ignore")  # NumPy warns of a signalling NaN too


@quiet
def by_ml_dtypes(rows):
    """(e4m3 bytes, e8m0 bytes, rows rounded) of a matrix, from the formulas in float64."""
    n = rows.shape[1]
    blocks = -(-n // 32)
    wide = np.zeros((rows.shape[0], blocks * 32))
    wide[:, :n] = rows
    wide = wide.reshape(-1, blocks, 32)
    amax = np.abs(wide).max(axis=2, initial=0)  # NaN where the block has one
    # frexp: amax / 448 = m * 2^e with m in [0.5, 1); exactly 0.5 is a power of two.
    mantissa, exponent = np.frexp(amax / 448)
    exponent = np.where(amax == 0, -127, np.maximum(exponent - (mantissa == 0.5), -127))
    scale = np.where(np.isfinite(amax), 2.0**exponent, 2.0**120)
    clipped = np.clip(wide / scale[:, :, None], -448, 448)  # NaN stays NaN
    values = clipped.astype(E4M3)
    scales = scale.astype(E8M0)
    rounded = (values.astype(np.float64) * scales.astype(np.float64)[:, :, None]).astype(rows.dtype)

    def flat(a):
        return a.reshape(len(rows), -1)[:, :n]

    return flat(values).view(np.uint8), scales.view(np.uint8), flat(rounded)


def by_jnp(rows):
    q = jax.jit(mok_jax.quantize_mxfp8, static_argnums=1)(rows, 1)
    return np.asarray(q.values).view(np.uint8), np.asarray(q.scales), np.asarray(q.dequantize(rows.dtype))


def by_host(rows):
    travelling, rounded = ops._host.quantize_mxfp8(rows.view(np.uint16))
    return *unpack(travelling, rows.shape[1]), rounded.view(BFLOAT16)


def unpack(travelling, n):
    """Values and scales of rows as they travel: chunks of 32 scales and 1024 values."""
    chunks = [travelling[:, at : at + 1056] for at in range(0, travelling.shape[1], 1056)]
    scales = np.concatenate([chunk[:, :32] for chunk in chunks], axis=1)
    values = np.concatenate([chunk[:, 32:] for chunk in chunks], axis=1)
    assert travelling.shape[1] == 32 * -(-n // 1024) + 16 * -(-n // 16)
    return values[:, :n], scales[:, : -(-n // 32)]


def by_cuda(rows):
    count, n = rows.shape
    chunks = -(-n // 1024)
    travelling = jax.ShapeDtypeStruct((count, 32 * chunks + 16 * -(-n // 16)), np.uint8)
    with on_device("cuda"):
        codec = jax.ffi.ffi_call("mok_quantize", (travelling, jax.ShapeDtypeStruct(rows.shape, BFLOAT16)))
        found, rounded = jax.device_get(jax.jit(codec)(rows))
    return *unpack(found, n), rounded


def by_jnp_on_cuda(rows):
    with on_device("cuda"):
        return by_jnp(rows)


CODECS = {"jnp": by_jnp, "host": by_host} | ({"cuda": by_cuda, "jnp_on_cuda": by_jnp_on_cuda} if GPU else {})


def without_sign_of_nan(codes):
    return np.where(codes & 0x7F == 0x7F, 0x7F, codes)


def normal_only(rows):
    """XLA on a CPU takes subnormal numbers for zeros."""
    tiny = np.abs(rows.astype(np.float32)) < 2.0**-126
    return np.where(tiny, 0, rows.astype(np.float32))


@pytest.fixture(params=CODECS.values(), ids=CODECS)
def codec(request):
    return request.param


@quiet
def check(codec, rows):
    values, scales, rounded = codec(rows)
    expected_values, expected_scales, expected_rounded = by_ml_dtypes(rows)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(without_sign_of_nan(values), without_sign_of_nan(expected_values))
    keep = normal_only if codec in (by_jnp, by_jnp_on_cuda) else lambda a: a.astype(np.float32)
    np.testing.assert_array_equal(keep(rounded), keep(expected_rounded))
    return values, scales, rounded


@pytest.mark.parametrize("position", range(32))
@pytest.mark.parametrize("largest", [0.0, 1.0, 2.0**-130], ids=["alone", "beside_1", "beside_subnormal"])
def test_every_bfloat16_in_every_position(codec, position, largest):
    rows = np.zeros((2**16, 32), BFLOAT16)
    rows[:, (position + 7) % 32] = largest
    rows[:, position] = EVERY
    check(codec, rows)


def test_amax_at_each_power_of_two_and_its_neighbours(codec):
    # 448 * 2^k is where the scale changes; 2^k where the exponent does.
    powers = np.concatenate([2.0 ** np.arange(-133, 128), 448 * 2.0 ** np.arange(-133, 120)]).astype(BFLOAT16)
    bits = powers.view(np.uint16)[:, None] + np.array([-1, 0, 1], np.int32)
    rows = np.random.default_rng(0).normal(size=(bits.size, 32)).astype(BFLOAT16)
    amax = bits.astype(np.uint16).view(BFLOAT16).reshape(-1)
    rows = (rows.astype(np.float64) / 8 * amax.astype(np.float64)[:, None]).astype(BFLOAT16)
    rows[:, 11] = amax
    _, scales, _ = check(codec, rows)
    assert len(np.unique(scales)) == 248  # all that there are


def test_a_zero_block_is_exact_with_the_least_scale(codec):
    rows = np.zeros((1, 64), BFLOAT16)
    rows[0, 40] = -0.0
    values, scales, rounded = check(codec, rows)
    assert scales.tolist() == [[0, 0]]
    assert values[0].tolist() == [0x80 if i == 40 else 0 for i in range(64)]
    assert not rounded.any()


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan], ids=str)
def test_what_is_not_finite_stays_in_its_block(codec, special):
    rows = np.random.default_rng(1).normal(size=(3, 96)).astype(BFLOAT16)
    clean = codec(rows)
    rows[1, 40] = special
    values, scales, rounded = check(codec, rows)
    np.testing.assert_array_equal(rounded[1, 40].astype(np.float32), np.float32(special))
    assert scales[1, 1] == 127 + 120
    inside = np.zeros(rows.shape, bool)
    inside[1, 32:64] = True
    assert np.isfinite(rounded[1, 32:64].astype(np.float32)).sum() == 31
    np.testing.assert_array_equal(values[~inside], clean[0][~inside])
    assert np.flatnonzero(scales != clean[1]).tolist() == [4]  # row 1, block 1
    np.testing.assert_array_equal(rounded[~inside].view(np.uint16), clean[2][~inside].view(np.uint16))


@pytest.mark.parametrize("n", [1, 31, 32, 33, 40, 95, 129, 1024, 1025, 2100])
def test_the_last_block_is_short(codec, n):
    # Of what lies behind the row nothing may be seen: the same rows cut from wider ones, which are larger there.
    rng = np.random.default_rng(n)
    wide = rng.normal(size=(5, n + 31)).astype(BFLOAT16)
    wide[:, n:] = 1e4
    rows = np.ascontiguousarray(wide[:, :n])
    values, scales, _ = check(codec, rows)
    assert values.shape == rows.shape
    assert scales.shape == (5, -(-n // 32))


def test_jnp_and_host_have_the_same_bits():
    rows = np.random.default_rng(2).permutation(np.tile(EVERY, 32)).reshape(-1, 128)[:, :120].copy()
    assert_same_bits(by_jnp(rows)[:2], by_host(rows)[:2])


def test_float32_is_rounded_once():
    # Around every midpoint of two e4m3 values, by one unit of float32 in the last place.
    codes = np.arange(0x7F, dtype=np.uint8).view(E4M3).astype(np.float32)
    middle = (codes[1:] + codes[:-1]) / 2
    values = np.concatenate([codes, *(np.nextafter(middle, np.float32(to)) for to in (0, 1e9)), middle])
    expected = values.astype(E4M3).view(np.uint8)
    np.testing.assert_array_equal(ops._host.to_e4m3(values), expected)
    rows = np.zeros((len(values), 32), np.float32)
    rows[:, 0], rows[:, 1] = 448, values
    found, _, rounded = by_jnp(rows)
    np.testing.assert_array_equal(found[:, 1], expected)
    np.testing.assert_array_equal(rounded[:, 1], values.astype(E4M3).astype(np.float32))


def test_every_e4m3_as_float():
    codes = np.arange(256, dtype=np.uint8)
    np.testing.assert_array_equal(ops._host.from_e4m3(codes), codes.view(E4M3).astype(np.float32))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_axes(axis):
    w = np.random.default_rng(3).normal(size=(33, 40, 70)).astype(np.float32)
    q = mok_jax.quantize_mxfp8(w, axis)
    last = mok_jax.quantize_mxfp8(np.moveaxis(w, axis, -1), -1)
    assert q.axis == (axis if axis < 0 else axis - 3)
    assert q.values.dtype == E4M3 and q.scales.dtype == np.uint8
    assert_same_bits(np.moveaxis(q.values, axis, -1), last.values)
    assert_same_bits(np.moveaxis(q.scales, axis, -1), last.scales)
    assert_same_bits(np.moveaxis(q.dequantize(), axis, -1), last.dequantize())


def test_a_slice_of_experts_is_the_slice_of_the_quantised():
    w = jnp.asarray(np.random.default_rng(4).normal(size=(3, 40, 70)), jnp.bfloat16)
    whole, each = mok_jax.quantize_weight(w), jax.vmap(mok_jax.quantize_weight)(w)
    assert_same_bits(each, whole)
    assert each.forward.axis == whole.forward.axis == -2
    assert_same_bits(jax.tree.map(lambda a: a[1], whole), mok_jax.quantize_weight(w[1]))


@pytest.mark.parametrize(
    ("w", "axis", "error", "text"),
    [
        (np.zeros((2, 3)), 0, TypeError, "w must be a bfloat16 or float32 array, got float64; cast it"),
        ([1.0], 0, TypeError, "w must be a bfloat16 or float32 array, got list; cast it"),
        (np.zeros((2, 3), "float32"), 2, ValueError, "axis must be an integer, one of the 2 axes of w, got 2"),
        (np.zeros((2, 3), "float32"), None, ValueError, "axis must be an integer, one of the 2 axes of w, got None"),
        (np.zeros((2, 3), "float32"), True, ValueError, "axis must be an integer, one of the 2 axes of w, got True"),
        (np.float32(1), 0, ValueError, "axis must be an integer, one of the 0 axes of w, got 0"),
    ],
    ids=["dtype", "list", "axis", "no_axis", "bool", "scalar"],
)
def test_refused(w, axis, error, text):
    refuse(error, f"quantize_mxfp8: {text}", mok_jax.quantize_mxfp8, w, axis)


def test_what_a_weight_must_be():
    text = "quantize_weight: w must be a bfloat16 or float32 array, got int32; cast it"
    refuse(TypeError, text, mok_jax.quantize_weight, np.ones((2, 2), np.int32))
    text = "quantize_weight: w must be [..., in, out], got float32[40]"
    refuse(ValueError, text, mok_jax.quantize_weight, np.ones(40, np.float32))
    q = mok_jax.quantize_mxfp8(np.ones(40, np.float32), 0)
    refuse(TypeError, "Mxfp8.dequantize: dtype must be bfloat16 or float32, got 'int32'", q.dequantize, "int32")


@pytest.mark.parametrize("spec", [("expert", None, "data"), ("expert", "data")], ids=str)
def test_weights_split_along_any_axis(spec):
    """Over Explicit axes a block may lie on two devices, and JAX reshapes no split axis by itself."""
    mesh = jax.make_mesh((2, 4), ("data", "expert"), axis_types=(AxisType.Explicit,) * 2)
    w = np.random.default_rng(5).normal(size=(8, 96, 64)).astype(np.float32)
    expected = mok_jax.quantize_weight(w)
    with jax.set_mesh(mesh):
        split = jax.device_put(w, NamedSharding(mesh, P(*spec)))
        quantized = jax.jit(mok_jax.quantize_weight)(split)
        assert_same_bits(quantized, expected)
        assert_same_bits(jax.jit(mok_jax.mxfp8.Mxfp8Weight.dequantize)(quantized), expected.dequantize())
