"""States are moved to one device without losing what else they hold."""

from __future__ import annotations

from collections import OrderedDict

import pytest

torch = pytest.importorskip("torch")

from trunkline._tensor_io.devices import copied_to, savable  # noqa: E402


def test_what_is_there_stays() -> None:
    tensor = torch.ones(2)
    state = {"a": [tensor, (tensor, 3)], "b": None}
    moved = savable(state)
    assert moved == state
    assert moved["a"][0] is tensor
    assert moved["a"][1][0] is tensor


def test_what_is_elsewhere_is_moved_and_stays_tied() -> None:
    weight, empty = torch.ones(4, 2), torch.ones(0)
    model = OrderedDict([("head", weight), ("embedding", weight.detach()), ("turned", weight.t())])
    model._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    moved = copied_to(
        {"model": model, 7: [empty, "text", ({"step": torch.tensor(3)},)]}, torch.device("meta")
    )
    assert type(moved["model"]) is OrderedDict
    assert moved["model"]._metadata == {"": {"version": 1}}
    assert list(moved["model"]) == ["head", "embedding", "turned"]
    assert moved["model"]["head"] is moved["model"]["embedding"]
    assert moved["model"]["turned"].shape == (2, 4)
    assert moved[7][1] == "text"
    assert all(each.is_meta for each in (moved["model"]["turned"], moved[7][0], moved[7][2][0]["step"]))
    assert not weight.is_meta


class WithoutAddress(torch.Tensor):
    """Poses as a tensor of a device whose tensors have no addresses, as XLA."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("xla", 0)

    def data_ptr(self) -> int:
        return 0

    def to(self, device: torch.device) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()


def test_tensors_without_addresses_stay_apart() -> None:
    one, other = (torch.full((3,), value).as_subclass(WithoutAddress) for value in (1.0, 2.0))
    moved = savable({"one": one, "other": other, "again": one})
    assert [moved[name].tolist() for name in moved] == [[1.0] * 3, [2.0] * 3, [1.0] * 3]
    assert moved["one"] is moved["again"]


def test_a_conjugate_is_not_taken_for_what_it_is_a_view_of() -> None:
    number = torch.tensor([1 + 2j])
    views = [number, number.conj(), number.imag, number.conj().imag]
    moved = copied_to(views, torch.device("meta"))
    assert len({id(each) for each in moved}) == len(views)
