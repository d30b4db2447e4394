"""What a Trainer saves of its model: all weights or, of a model of PEFT, the adapters without the base."""

import sys
from typing import Any

from trunkline._errors import Format


def model_state(model: Any) -> dict[str, Any]:
    """Return the entries of a checkpoint: "model", the state of the model and, of one of PEFT, "adapters".

    "adapters" has, by the name of each adapter, what PEFT saves of it; "model" is empty then. A model whose
    base is trained as well is saved as a whole.
    """
    if not _is_of_peft(model):
        return {"model": model.state_dict()}
    import peft

    adapters = {name: peft.get_peft_model_state_dict(model, adapter_name=name) for name in model.peft_config}
    saved = {tensor.data_ptr() for adapter in adapters.values() for tensor in adapter.values()}
    if any(each.requires_grad and each.data_ptr() not in saved for each in model.parameters()):
        return {"model": model.state_dict()}
    return {"model": {}, "adapters": adapters}


def load_model_state(model: Any, state: dict[str, Any], source: str) -> None:
    """Load these entries of a checkpoint into a model, which has the same adapters.

    They are removed from `state`. Raises Format for the checkpoint of another kind of model.
    """
    adapters = state.pop("adapters", None)
    weights = state.pop("model")
    if adapters is None:
        model.load_state_dict(weights)
        return
    if not _is_of_peft(model) or adapters.keys() - model.peft_config.keys():
        raise Format(
            None,
            f"cannot resume from {source}: the checkpoint holds adapters of PEFT "
            f"({', '.join(adapters)}), and this model does not have them; make the model with "
            "peft.get_peft_model first, as it was made for the training",
            source,
        )
    import peft

    for name, adapter in adapters.items():
        _check_same_weights(adapter, peft.get_peft_model_state_dict(model, adapter_name=name), name, source)
    for name, adapter in adapters.items():
        peft.set_peft_model_state_dict(model, adapter, adapter_name=name)


def _check_same_weights(stored: dict[str, Any], present: dict[str, Any], name: str, source: str) -> None:
    """Raise Format unless an adapter has the weights that were stored: PEFT ignores others."""
    dropped, missing = sorted(stored.keys() - present.keys()), sorted(present.keys() - stored.keys())
    if dropped or missing:
        example = (dropped or missing)[0]
        lacking = "this model does not have" if dropped else "the checkpoint does not have"
        raise Format(
            None,
            f"cannot resume from {source}: the adapter {name!r} of this model covers other modules than that "
            f"of the checkpoint ({lacking} {example}); make it with the LoraConfig of the training, or start "
            "over in another output_dir",
            source,
        )


def _is_of_peft(model: Any) -> bool:
    package = sys.modules.get("peft")  # without it there is no such model
    return package is not None and isinstance(model, package.PeftModel)
