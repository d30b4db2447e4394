"""Nested states as JSON and named tensors, and back."""

import argparse
import collections
import contextlib
import dataclasses
import datetime
import enum
import json
import math
import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

import trunkline as tl  # noqa: E402
from trunkline._tensor_io.tensors import in_safetensors, to_stored  # noqa: E402
from trunkline.checkpoint.state import tree  # noqa: E402
from trunkline.checkpoint.state.leaves import shown_key  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a tensor, whatever its strides."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    stored = to_stored(tensor).contiguous()
    return bytes(stored.reshape(-1).view(torch.uint8).numpy())


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Both are the same in type and value, to the bit."""
    assert type(a) is type(b), where
    if isinstance(a, torch.Tensor):
        assert a.dtype is b.dtype, where
        assert a.shape == b.shape, where
        assert a.requires_grad == b.requires_grad, where
        assert bits(a) == bits(b), where
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes()), where
    elif isinstance(a, (np.str_, np.bytes_)):
        assert a == b, where
    elif isinstance(a, np.generic):
        assert (a.dtype, a.tobytes()) == (b.dtype, b.tobytes()), where
    elif isinstance(a, float):
        assert struct.pack("<d", a) == struct.pack("<d", b), where
    elif isinstance(a, complex):
        assert struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag), where
    elif isinstance(a, dict):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a.items(), b.items(), strict=True)):
            assert_same(x[0], y[0], f"{where} key {i}")
            assert_same(x[1], y[1], f"{where}[{shown_key(x[0])}]")
        assert getattr(a, "__dict__", {}) == getattr(b, "__dict__", {}), where
    elif isinstance(a, (list, tuple)) and type(a) is not torch.Size:
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]")
    elif isinstance(a, (set, frozenset)):
        assert {(type(x), repr(x)) for x in a} == {(type(x), repr(x)) for x in b}, where
    else:
        assert a == b, where


def check_skeleton(node: Any, depth: int = 0) -> None:
    assert depth < 100
    if type(node) is list:
        for item in node:
            check_skeleton(item, depth + 1)
    elif type(node) is dict:
        for key, item in node.items():
            assert type(key) is str
            check_skeleton(item, depth + 1)
    elif type(node) is float:
        assert math.isfinite(node)
    elif type(node) is int:
        assert -(2**63) <= node < 2**63
    elif type(node) is str:
        node.encode()
    else:
        assert node is None or type(node) is bool


def round_trip(state: Any) -> Any:
    """Through JSON text, and tensors in memory of their own that is contiguous, as after loading."""
    skeleton, tensors = tree.flatten(state)
    check_skeleton(skeleton)
    text = json.dumps(skeleton, allow_nan=False, ensure_ascii=False, sort_keys=True)
    text.encode()
    loaded = {}
    for name, tensor in tensors.items():
        name.encode()
        assert type(tensor) is torch.Tensor
        assert in_safetensors(tensor.dtype)
        assert not tensor.requires_grad
        if tensor.dtype.itemsize == 1:
            loaded[name] = tensor.view(torch.uint8).clone().contiguous().view(tensor.dtype)
        else:
            loaded[name] = tensor.clone(memory_format=torch.contiguous_format)
    return tree.restore(json.loads(text), loaded)


any_text = st.text(st.characters(exclude_categories=[]), max_size=8)
floats = (
    st.floats()
    | st.sampled_from([-0.0, math.nan, -math.nan, math.inf, -math.inf, 5e-324])
    | st.builds(lambda b: struct.unpack("<d", b)[0], st.binary(min_size=8, max_size=8))
)
dtypes = sorted((d for d in vars(torch).values() if isinstance(d, torch.dtype)), key=str)
DTYPES = [d for d in dict.fromkeys(dtypes) if not str(d).startswith(("torch.qu", "torch.qi"))]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    raw = draw(
        st.binary(min_size=math.prod(shape) * dtype.itemsize, max_size=math.prod(shape) * dtype.itemsize)
    )
    if dtype is torch.bool:
        raw = bytes(b & 1 for b in raw)
    if raw:
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    grad = dtype.is_floating_point and draw(st.booleans())
    if draw(st.booleans()):
        return torch.nn.Parameter(tensor, grad)
    return tensor.requires_grad_(grad)


scalars = st.one_of(
    *(st.none(), st.booleans(), st.integers(), floats, any_text, st.binary(max_size=8)),
    st.sampled_from([2**63, -(2**63), 2**64, 10**4000, -(10**4000)]),
    st.builds(complex, floats, floats),
    st.sampled_from(DTYPES),
    st.sampled_from(
        [torch.device("cpu"), torch.device("cuda:3"), torch.device("cuda"), torch.device("meta")]
    ),
    st.builds(torch.Size, st.lists(st.integers(0, 2**62), max_size=3)),
)
keys = st.recursive(scalars, lambda k: st.lists(k, max_size=3).map(tuple), max_leaves=3)
arrays = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        np.random.default_rng(seed).bytes(math.prod(shape) * np.dtype(dtype).itemsize), dtype
    ).reshape(shape),
    st.sampled_from(
        [
            "<f4",
            ">f4",
            "<i8",
            ">i2",
            "<u2",
            "<u8",
            "<c8",
            "<c16",
            "<M8[ns]",
            "<m8[3s]",
            "|V3",
            "|S5",
            "<f2",
            "|u1",
        ]
    ),
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 99),
)
numpy_scalars = st.sampled_from(
    [
        *(
            np.float32(1.5),
            np.float64(-0.0),
            np.int8(-3),
            np.bool_(True),
            np.uint64(2**64 - 1),
            np.complex64(1j),
        ),
        *(np.datetime64("2020-02-02", "ns"), np.timedelta64(3, "s"), np.float16(math.nan), np.str_("a\0")),
        *(np.str_(""), np.bytes_(b"a\0"), np.dtype("<f4"), np.dtype([("a", "<f4"), ("b", ">i2", (2,))])),
        *(np.longdouble(1) / 3, np.array((1, 2.5), [("a", "<i4"), ("b", "<f8")])[()]),
    ]
)
states = st.recursive(
    scalars | tensors() | arrays | numpy_scalars,
    lambda s: st.one_of(
        st.lists(s, max_size=4),
        st.lists(s, max_size=4).map(tuple),
        st.dictionaries(keys, s, max_size=4),
        st.dictionaries(any_text, s, max_size=4).map(collections.OrderedDict),
        st.sets(keys, max_size=4),
        st.frozensets(keys, max_size=4),
        st.dictionaries(any_text, st.integers(), max_size=3).map(collections.Counter),
    ),
    max_leaves=12,
)


@settings(max_examples=400, deadline=None)
@given(states)
def test_any_state_comes_back(state: Any) -> None:
    assert_same(round_trip(state), state)


# What may stand anywhere in JSON, with words of the notation among it.
words = st.sampled_from(
    [
        *("dict", "tuple", "tensor", "ndarray", "dtype", "shape", "int", "float", "str", "size", "set"),
        *("numpy.scalar", "numpy.dtype", "OrderedDict", "_metadata", "Counter", "device", "complex"),
        *("F32", "<f4", "|O", "a", "AAAA", "7ff8000000000000"),
    ]
)
hostile = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | words | st.text(max_size=3) | st.just([2]),
    lambda s: st.lists(s, max_size=4) | st.dictionaries(words, s, max_size=3),
    max_leaves=12,
)


@settings(max_examples=600, deadline=None)
@given(hostile)
def test_a_bad_skeleton_is_a_format_error(skeleton: Any) -> None:
    tensors = {"a": torch.zeros(2), "F32": torch.zeros(2, dtype=torch.uint8)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(tl.Format):
            state = tree.restore(skeleton, {})
            assert_same(round_trip(state), state)
        with contextlib.suppress(tl.Format):
            tree.restore(skeleton, tensors)
        with contextlib.suppress(tl.Format, ValueError):
            tree.restore_into(skeleton, {"a": torch.zeros(2)})


@settings(max_examples=300, deadline=None)
@given(states, st.data())
def test_a_skeleton_that_was_changed_is_a_format_error_or_another_state(
    state: Any, data: st.DataObject
) -> None:
    skeleton, tensors = tree.flatten(state)
    holder = [skeleton]
    place: Any = holder
    index: Any = 0
    while type(place[index]) in (list, dict) and place[index] and data.draw(st.booleans()):
        place = place[index]
        index = data.draw(st.sampled_from(range(len(place)) if type(place) is list else sorted(place)))
    place[index] = data.draw(hostile)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with contextlib.suppress(tl.Format):
            tree.restore(holder[0], {name: to_stored(t).contiguous() for name, t in tensors.items()})


@pytest.mark.parametrize(
    ("skeleton", "says"),
    [
        (math.nan, "not finite"),
        (2**64, "64 bits"),
        ({"int": "0x1f"}, "beyond 64 bits"),
        ({"float": "3ff0"}, "16 hexadecimal"),
        ({"dict": [1]}, "keys and values"),
        ({"dict": ["a", 1, "a", 2]}, "duplicated"),
        ({"dict": [[1], 1]}, "not a value"),
        ({"dict": [], "more": 1}, "keys"),
        ({"set": [1, 1]}, "duplicated"),
        ({"ndarray": "a", "dtype": "|O", "shape": [2]}, "numpy"),
        ({"ndarray": "a", "dtype": [["a", "|O"]], "shape": [2]}, "numpy"),
        ({"numpy.scalar": "AAAAAAAAAAA=", "dtype": "|O8"}, "numpy"),
        ({"numpy.scalar": "AAAA", "dtype": "<f4"}, "not a scalar"),
        ({"tensor": "a", "dtype": "F32", "shape": [3]}, "not torch.float32, [3]"),
        ({"tensor": "b", "dtype": "F32", "shape": [2]}, "missing"),
        ({"tensor": "a", "dtype": "I64", "shape": [2], "requires_grad": True}, "gradients"),
        ({"tensor": "a", "dtype": "F32", "shape": [-2]}, "shape"),
        ({"tensor": "a", "dtype": "F9", "shape": [2]}, "not a dtype of this torch"),
        ({"device": "toaster"}, "device"),
        ({"bytes": "A"}, "bytes"),
        ({"str": "/w=="}, "str"),
        ({"nonsense": 1}, "not a value"),
        (
            [{"tensor": "a", "dtype": "F32", "shape": [2]}, {"tensor": "a", "dtype": "I32", "shape": [2]}],
            "elsewhere",
        ),
        ([1], "does not name the tensors 'a'"),
    ],
)
def test_bad_skeletons_say_what_is_wrong(skeleton: Any, says: str) -> None:
    with pytest.raises(tl.Format, match=re.escape(says)):
        tree.restore(skeleton, {"a": torch.zeros(2)})


def test_deep_skeletons_are_refused() -> None:
    for wrap in (lambda s: [s], lambda s: {"dict": ["a", s]}, lambda s: {"set": [{"tuple": [s]}]}):
        deep: Any = 1
        for _ in range(100_000):
            deep = wrap(deep)
        with pytest.raises(tl.Format, match="deep"):
            tree.restore(deep, {})
        while deep != 1:  # piece by piece: freeing it at once takes as deep a stack
            deep = deep[0] if type(deep) is list else next(iter(deep.values()))
            deep = deep[-1] if deep != 1 else deep


def test_names_are_readable_and_unique() -> None:
    t = [torch.tensor([float(i)]) for i in range(9)]
    state = {
        "model": {"layers": [{"weight": t[0]}], "layers.0": {"weight": t[1]}},
        "optimizer": {"state": {0: {"exp_avg": t[2]}, "0": {"exp_avg": t[3]}}},
        "__metadata__": t[4],
        "\ud800\n": t[5],
        ("a", 1): t[6],
        "": t[7],
    }
    skeleton, tensors = tree.flatten(state)
    assert {name: int(value) for name, value in tensors.items()} == {
        "model.layers.0.weight": 0,
        "model.layers.0.weight~2": 1,
        "optimizer.state.0.exp_avg": 2,
        "optimizer.state.0.exp_avg~2": 3,
        "__metadata__~2": 4,
        "__": 5,
        "('a', 1)": 6,
        "tensor": 7,
    }
    assert_same(tree.restore(skeleton, tensors), state)
    assert list(tree.flatten(t[8])[1]) == ["tensor"]


def test_tied_weights_are_stored_once_and_stay_tied() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = torch.nn.Embedding(5, 3)
            self.head = torch.nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight

    model = Tied()
    state = {
        "model": model.state_dict(),
        "parameters": list(model.parameters()),
        "view": model.embed.weight[1:],
    }
    skeleton, tensors = tree.flatten(state)
    assert list(tensors) == ["model.embed.weight"]
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    loaded = tree.restore(json.loads(json.dumps(skeleton)), copies)
    assert loaded["model"]["embed.weight"] is loaded["model"]["head.weight"]
    assert type(loaded["parameters"][0]) is torch.nn.Parameter
    assert loaded["parameters"][0].data_ptr() == loaded["model"]["embed.weight"].data_ptr()
    assert_same(loaded["model"], state["model"])
    assert loaded["view"].data_ptr() == loaded["model"]["embed.weight"][1:].data_ptr()


def test_overlapping_views_are_stored_once() -> None:
    base = torch.arange(12.0)
    state = [
        base,
        base[:6],
        base[6:],
        base.view(3, 4),
        base.view(3, 4).t(),
        base.view(torch.int32),
        base.expand(2, 12),
    ]
    skeleton, tensors = tree.flatten(state)
    assert list(tensors) == ["0"]
    assert_same(round_trip(state), state)
    assert {node["tensor"] for node in skeleton} == {"0"}


def test_repeated_containers_are_values_and_cycles_are_refused() -> None:
    part = {"a": [1]}
    assert round_trip([part, part]) == [part, part]
    cycle: dict[str, Any] = {"x": [{}]}
    cycle["x"][0]["y"] = cycle
    with pytest.raises(tl.Unsupported, match=re.escape("state['x'][0]['y']")):
        tree.flatten(cycle)
    deep: Any = 1
    for _ in range(48):
        deep = [deep]
    assert round_trip(deep) == deep
    with pytest.raises(tl.Unsupported, match="nested more than 48"):
        tree.flatten([deep])


def test_keys_of_any_size_and_depth() -> None:
    huge = {10**5000: torch.zeros(1), "x" * 1000: torch.ones(1)}
    skeleton, tensors = tree.flatten(huge)
    assert max(map(len, tensors)) <= 400
    assert_same(tree.restore(skeleton, tensors), huge)
    key: Any = ()
    for _ in range(100_000):
        key = (key,)
    with pytest.raises(tl.Unsupported, match=re.escape("state['k']")):
        tree.flatten({"k": {1: 2, "l": {frozenset([()]): key}}})
    while key:  # piece by piece: freeing it at once takes as deep a stack
        key = key[0]


class Wrapped(torch.Tensor):
    """A subclass."""


def nested_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])


def quantised_tensor() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8)


class _Pair(NamedTuple):
    a: int


CONVERT = "; save what it consists of: dicts, lists, numbers, strings, tensors or arrays"
IN_PT = "; save it in a separate .pt file (trunkline.save)"
ARRAY = "; convert it to a list, or to an array of numbers or strings"


@pytest.mark.parametrize(
    ("make", "says", "hint"),
    [
        (object, "is a builtins.object", CONVERT),
        (lambda: print, "is a builtins.builtin_function_or_method", CONVERT),
        (lambda: bytearray(b"a"), "bytearray", "save bytes(...) of it"),
        (lambda: collections.namedtuple("P", "x")(1), "P", "save its _asdict()"),
        (lambda: torch.Generator(), "Generator", "save its get_state()"),
        (lambda: torch.nn.Linear(1, 1), "Linear", "save its state_dict()"),
        (lambda: torch.zeros(2).as_subclass(Wrapped), "subclass of torch.Tensor", IN_PT),
        (lambda: torch.zeros(2).to_sparse(), "sparse", IN_PT),
        (nested_tensor, "nested tensor", IN_PT),
        (quantised_tensor, "quantised", IN_PT),
        (lambda: torch.zeros(2).to_mkldnn(), "MKL-DNN", "; convert it with .to_dense()"),
        (lambda: torch.zeros(2, device="meta"), "on the meta device", "on another device first"),
        (lambda: np.array([object()]), "objects", ARRAY),
        (lambda: np.ma.masked_array([1], [True]), "MaskedArray", CONVERT),
        (lambda: np.array(["a"], np.dtypes.StringDType()), "objects", ARRAY),
    ],
)
def test_what_cannot_be_stored_is_named(make: Callable[[], Any], says: str, hint: str) -> None:
    for state, place in (
        ({"model": {"x": [0, 0, 0, make()]}}, "state['model']['x'][3]"),
        (make(), "state "),
    ):
        with pytest.raises(tl.Unsupported, match=re.escape(says)) as caught:
            tree.flatten(state)
        assert str(caught.value).startswith(place)
        assert str(caught.value).endswith(hint)


class Color(enum.Enum):
    RED = 1


class Number(enum.IntEnum):
    ONE = 1


def quantised_parts(tensor: Any) -> list[Any]:
    return [tensor.dequantize(), tensor.q_scale(), tensor.q_zero_point(), tensor.dtype]


@pytest.mark.filterwarnings("ignore")  # of torch: quantized tensors are deprecated, nested ones a prototype
@pytest.mark.parametrize(
    ("make", "convert", "back"),
    [
        (lambda: _Pair(1), lambda value: value._asdict(), lambda saved: _Pair(**saved)),
        (lambda: collections.deque([1, 2], 3), list, lambda saved: collections.deque(saved, 3)),
        (lambda: Color.RED, lambda value: value.name, lambda saved: Color[saved]),
        (lambda: Number.ONE, lambda value: value.name, lambda saved: Number[saved]),
        (lambda: torch.eye(2).to_sparse(), lambda value: value.to_dense(), lambda saved: saved.to_sparse()),
        (
            lambda: torch.quantize_per_tensor(torch.arange(3.0), 0.5, 1, torch.qint8),
            quantised_parts,
            lambda saved: torch.quantize_per_tensor(*saved),
        ),
        (nested_tensor, lambda value: list(value.unbind()), torch.nested.nested_tensor),
    ],
    ids=["namedtuple", "deque", "Enum", "IntEnum", "sparse", "quantized", "nested"],
)
def test_what_the_docs_advise_to_save_instead_comes_back(
    make: Callable[[], Any], convert: Callable[[Any], Any], back: Callable[[Any], Any], tmp_path: Path
) -> None:
    value = make()
    checkpoints = tl.Checkpointer(tmp_path / "run", process_group=False)
    with pytest.raises(tl.Unsupported, match=r"^state\['x'\] is "):
        checkpoints.save(1, {"x": value})
    checkpoints.save(1, {"x": convert(value)}, block=True)
    loaded = back(checkpoints.load()["x"])
    assert type(loaded) is type(value)
    assert repr(loaded) == repr(value)


def test_keys_that_cannot_be_stored_are_named() -> None:
    with pytest.raises(tl.Unsupported, match=r"^state\['a'\]\[.*object.*\]: the key is a builtins.object"):
        tree.flatten({"a": {object(): 1}})


def test_a_distributed_tensor_leads_to_dcp() -> None:
    class DTensor(torch.Tensor):
        pass

    with pytest.raises(tl.Unsupported, match="torch.distributed.checkpoint"):
        tree.flatten([torch.zeros(2).as_subclass(DTensor)])


def test_lazy_tensors_are_computed() -> None:
    z = torch.tensor([1 + 2j, 3 - 4j])
    state = [z.conj(), z.imag, z.conj().imag, torch.tensor([1 + 2j], dtype=torch.complex128).conj()]
    assert state[2].is_neg()
    loaded = round_trip(state)
    for got, want in zip(loaded, state, strict=True):
        assert torch.equal(got, want.resolve_conj().resolve_neg())
        assert not got.is_conj()
        assert not got.is_neg()


def test_autograd_ends_at_a_stored_tensor() -> None:
    x = torch.ones(3, requires_grad=True)
    [y] = round_trip([x * 2])
    assert y.is_leaf
    assert y.requires_grad
    assert y.tolist() == [2, 2, 2]


def test_names_of_dtypes() -> None:
    for dtype in dict.fromkeys(dtypes):
        assert tree.dtype_named(tree.dtype_name(dtype)) is dtype
    assert tree.dtype_name(torch.bfloat16) == "BF16"
    assert tree.dtype_name(torch.complex128) == "torch.complex128"
    for bad in ("bfloat16", "", "torch.nn", "torch.float32"):
        with pytest.raises(ValueError, match="not a dtype"):
            tree.dtype_named(bad)


# Optimizers, schedulers and modules -------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3), betas=(0.9, 0.99)),
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "LBFGS": lambda p: torch.optim.LBFGS(list(p), history_size=3),
    **{
        name: getattr(torch.optim, name)
        for name in (
            "Adafactor",
            "Adagrad",
            "Adadelta",
            "Adamax",
            "ASGD",
            "NAdam",
            "RAdam",
            "RMSprop",
            "Rprop",
        )
    },
}


def small_model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step))

        def loss(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            value: torch.Tensor = model(x).square().sum()
            value.backward()
            return value

        optimizer.step(loss)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_as_if_uninterrupted(name: str) -> None:
    model = small_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 3)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    loaded = round_trip(state)
    assert_same(loaded, state)

    resumed = small_model()
    resumed.load_state_dict(loaded["model"])
    resumed_optimizer = OPTIMIZERS[name](resumed.parameters())
    resumed_optimizer.load_state_dict(loaded["optimizer"])
    train(model, optimizer, 2)
    train(resumed, resumed_optimizer, 2)
    assert_same(resumed.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 1, 3]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
        lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    ],
)
def test_states_of_schedulers(make: Callable[[Any], Any]) -> None:
    scheduler = make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))
    state = scheduler.state_dict()
    assert_same(round_trip(state), state)


MODULES: list[Callable[[], torch.nn.Module]] = [
    lambda: torch.nn.BatchNorm2d(3),
    lambda: torch.nn.MultiheadAttention(8, 2, kdim=4, vdim=6, add_bias_kv=True),
    lambda: torch.nn.TransformerEncoderLayer(8, 2, 16),
    lambda: torch.nn.LSTM(3, 5, num_layers=2, bidirectional=True, proj_size=2),
    lambda: torch.nn.GRU(3, 5),
    lambda: torch.nn.Conv3d(2, 3, 2),
    lambda: torch.nn.GroupNorm(2, 4),
    lambda: torch.nn.EmbeddingBag(4, 3),
    lambda: torch.nn.PReLU(3),
    lambda: torch.nn.Bilinear(2, 3, 4),
    lambda: torch.nn.SyncBatchNorm(3),
    lambda: torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 4)),
    lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(3, 4)),
    lambda: torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(2))}),
    lambda: torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    lambda: torch.nn.Linear(3, 4).to(torch.bfloat16),
    lambda: torch.nn.Linear(3, 4, dtype=torch.complex128),
]


@pytest.mark.parametrize("index", range(len(MODULES)))
def test_states_of_modules(index: int) -> None:
    model = MODULES[index]()
    state = model.state_dict()
    loaded = round_trip(state)
    assert_same(loaded, state)
    assert type(loaded) is collections.OrderedDict
    assert loaded._metadata == state._metadata
    MODULES[index]().load_state_dict(loaded)


# In place ----------------------------------------------------------------------------------------------


def test_into_is_filled_in_place() -> None:
    saved = {"model": small_model().state_dict(), "z": torch.ones(2, dtype=torch.complex128), "step": 7}
    saved["array"], saved["dates"] = np.arange(6.0).reshape(2, 3), np.array(["2020-01-01"], "M8[D]")
    skeleton, tensors = tree.flatten(saved)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    into = {"step": 0, "model": model.state_dict(), "z": torch.zeros(2, dtype=torch.complex128)}
    into["array"], into["dates"] = np.zeros((2, 3)), np.zeros(1, "M8[D]")
    state, targets, finish = tree.restore_into(json.loads(json.dumps(skeleton)), into)
    assert targets.keys() == tensors.keys()
    for name, target in targets.items():
        assert target.is_contiguous()
        target.copy_(tensors[name])
    finish()
    assert_same(state, saved)
    assert_same(model.state_dict(), saved["model"])
    assert state["z"] is into["z"]
    assert state["array"] is into["array"]
    assert into["step"] == 0


@pytest.mark.parametrize("dtype", ["<f4", "<M8[s]"])
def test_arrays_with_strides_that_mean_nothing_are_shared(dtype: str) -> None:
    array = np.zeros((1, 2), dtype)[::-1]
    skeleton, tensors = tree.flatten({"a": array, "b": array})
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == 1
    tree.restore_into(skeleton, {"a": array, "b": array})


@pytest.mark.parametrize(
    ("tensor", "alike"),
    [
        (torch.randn(1, 4, 2, 2).to(memory_format=torch.channels_last), lambda tensor: tensor[::2]),
        (torch.randn(3, 1, 5).transpose(0, 2), lambda tensor: tensor[:, ::2]),
        (torch.randn(6, 4)[::2, 1:2], lambda tensor: tensor[:, ::2]),
    ],
)
def test_a_state_fits_itself_whatever_the_strides_of_extents_of_one(
    tensor: torch.Tensor, alike: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    state = {"a": tensor, "b": alike(tensor)}
    skeleton, tensors = tree.flatten(state)
    assert len(tensors) == 1
    saved, expected = {name: each.clone() for name, each in tensors.items()}, tensor.clone()
    tensor.zero_()
    _, targets, finish = tree.restore_into(skeleton, state)
    for name, target in targets.items():
        target.copy_(saved[name].reshape(-1).view(target.dtype).reshape(target.shape))
    finish()
    assert torch.equal(tensor, expected)


@pytest.mark.parametrize("array", [np.arange(1.0)[::-1], np.zeros((0, 3), "<M8[s]")[::-1], np.array(1.0)])
def test_into_may_have_negative_strides_that_mean_nothing(array: Any) -> None:
    skeleton, _ = tree.flatten({"a": array.copy()})
    state, targets, finish = tree.restore_into(skeleton, {"a": array})
    for target in targets.values():
        target.fill_(7)
    finish()
    assert state["a"] is array
    assert (array.view("u1" if array.dtype.kind == "M" else array.dtype) == 7).all()


def test_into_with_tied_weights() -> None:
    weight = torch.ones(3)
    skeleton, _ = tree.flatten({"a": weight, "b": weight})
    target = torch.zeros(3)
    state, targets, finish = tree.restore_into(skeleton, {"a": target, "b": target.detach()})
    assert list(targets) == ["a"]
    targets["a"].fill_(1)
    assert state["b"].tolist() == [1, 1, 1]
    finish()
    assert state["b"].tolist() == [1, 1, 1]
    state, targets, finish = tree.restore_into(skeleton, {"a": torch.zeros(3), "b": torch.zeros(3)})
    targets["a"].fill_(1)
    finish()
    assert state["b"].tolist() == [1, 1, 1]
    apart, _ = tree.flatten({"a": torch.ones(3), "b": torch.zeros(3)})
    memory = torch.zeros(5)
    with pytest.raises(ValueError, match=r"state\['a'\] and state\['b'\] share memory"):
        tree.restore_into(apart, {"a": memory[:3], "b": memory[2:]})
    tree.restore_into(apart, {"a": torch.zeros(6)[:3], "b": torch.zeros(6)[3:]})


READ_ONLY = np.zeros(2, ">i4")
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"w": torch.zeros(3, 2)},
            "state['m']['w'] is torch.float32, [3, 2], but the checkpoint has torch.float32, [2, 3]",
        ),
        ({"w": torch.zeros(2, 3, dtype=torch.int32)}, "torch.int32, [2, 3]"),
        ({"w": torch.zeros(1).expand(2, 3)}, "state['m']['w'] has elements that share memory"),
        ({"w": torch.zeros(2, 3, device="meta")}, "meta"),
        ({"w": None}, "state['m']['w'] is a NoneType"),
        ({"w": np.zeros((2, 3), np.float32)}, "is a ndarray"),
        ({"more": 1}, "state['m'] has the key 'more', which the checkpoint lacks; remove it"),
        (
            {"w": ...},
            "state['m'] lacks the key 'w' of the checkpoint; it must have all of them: pass keys= as well",
        ),
        ({"list": [1]}, "state['m']['list'] is of 1 items"),
        ({"list": 1}, "state['m']['list'] is a int"),
        ({"list": [1, torch.zeros(1)]}, "state['m']['list'][1] is a Tensor"),
        ({"array": np.zeros(2, "<i4")}, "int32"),
        ({"array": np.zeros(4, ">i4")[::2]}, "not contiguous"),
        ({"array": READ_ONLY}, "read-only"),
        ({"z": torch.zeros(2, dtype=torch.complex64).conj()}, "is a lazy conjugate"),
    ],
)
def test_into_that_differs_is_named(change: dict[str, Any], says: str) -> None:
    def make() -> dict[str, Any]:
        parts = {"w": torch.zeros(2, 3), "list": [1, 2], "array": np.zeros(2, ">i4")}
        return {"m": {**parts, "z": torch.zeros(2, dtype=torch.complex64)}}

    skeleton, _ = tree.flatten(make())
    tree.restore_into(skeleton, make())
    into = make()
    into["m"].update(change)
    into["m"] = {key: value for key, value in into["m"].items() if value is not ...}
    with pytest.raises(ValueError, match="^into: ") as caught:
        tree.restore_into(skeleton, into)
    assert says in str(caught.value)


class _Colour(enum.IntEnum):
    RED = 1


@dataclasses.dataclass
class _Options:
    rate: float = 0.1


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (Path("a"), "save str(path)"),
        (_Pair(1), "save its _asdict()"),
        (_Colour.RED, "save its name or its value (e.name, e.value)"),
        (_Options(), "save dataclasses.asdict(...) of it"),
        (datetime.datetime(2026, 1, 1), "save its isoformat()"),
        (collections.defaultdict(int), "save dict(...) of it"),
        (collections.deque([1]), "save list(...) of it"),
        (torch.Generator(), "save its get_state()"),
        (np.random.default_rng(0), "save its bit_generator.state"),
        (torch.nn.Linear(1, 1), "save its state_dict()"),
        (torch.optim.SGD([torch.zeros(1)]), "save its state_dict()"),
        (argparse.Namespace(), "save vars(args)"),
        (torch.nn.Linear, "save its name"),
        (lambda: 1, CONVERT.removeprefix("; ")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_without_a_form_say_what_to_convert_them_to(value: Any, advice: str) -> None:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    with pytest.raises(tl.Unsupported) as caught:
        tree.flatten({"a": value})
    assert str(caught.value) == f"state['a'] is a {kind}, which cannot be saved; {advice}"
    if value.__hash__ is not None and not isinstance(value, tuple):
        with pytest.raises(
            tl.Unsupported, match="the key is a .*; use a string, a number, or a tuple of these"
        ):
            tree.flatten({value: 1})
