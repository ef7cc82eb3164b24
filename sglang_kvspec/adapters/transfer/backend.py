"""Registration of `kvspec` among SGLang's KV transfer backends, whose list is closed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_kvspec.adapters.compat.disaggregation import (
    DisaggregationMode,
    KVClassType,
    TransferBackend,
)
from sglang_kvspec.adapters.transfer_flags import TRANSFER_BACKEND

_MEMBER = "KVSPEC"


def register() -> None:
    """Add `kvspec` to SGLang's enum of backends, once a process."""
    if _MEMBER in TransferBackend._member_map_:
        return
    # An Enum cannot be extended; this is what its metaclass does for a member.
    member = object.__new__(TransferBackend)
    member._name_, member._value_ = _MEMBER, TRANSFER_BACKEND
    member._sort_order_ = len(TransferBackend._member_names_)
    TransferBackend._member_map_[_MEMBER] = member
    TransferBackend._value2member_map_[TRANSFER_BACKEND] = member
    TransferBackend._member_names_.append(_MEMBER)
    type.__setattr__(TransferBackend, _MEMBER, member)


def kv_class(
    original: Callable[..., Any], transfer_backend: TransferBackend, class_type: KVClassType
) -> Any:
    """Return KVSpec's class for its backend, and what disaggregation.utils.get_kv_class returns for
    all others."""
    if transfer_backend is not TransferBackend(TRANSFER_BACKEND):
        return original(transfer_backend, class_type)
    from sglang_kvspec.adapters.compat.transfer import CommonKVBootstrapServer, KVArgs
    from sglang_kvspec.adapters.transfer.decode import KVSpecReceiver
    from sglang_kvspec.adapters.transfer.prefill import KVSpecSender

    return {
        KVClassType.KVARGS: KVArgs,
        KVClassType.MANAGER: _make_manager,
        KVClassType.SENDER: KVSpecSender,
        KVClassType.RECEIVER: KVSpecReceiver,
        KVClassType.BOOTSTRAP_SERVER: CommonKVBootstrapServer,
    }[class_type]


def _make_manager(
    kv_args: Any, mode: DisaggregationMode, server_args: Any, is_mla_backend: bool = False
) -> Any:
    """Make the KV manager of this side. SGLang calls this for the scheduler once it has pools."""
    from sglang_kvspec.adapters.transfer.decode import DecodeManager
    from sglang_kvspec.adapters.transfer.peers import serving
    from sglang_kvspec.adapters.transfer.prefill import PrefillManager

    assert not is_mla_backend, "models with MLA must be refused at the start"
    manager = PrefillManager if mode is DisaggregationMode.PREFILL else DecodeManager
    made = manager(kv_args, server_args, serving())
    serving().manager = made
    return made
