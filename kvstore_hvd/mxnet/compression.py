"""Gradient compression, in Horovod's words."""

from __future__ import annotations

from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.store.arrays import buffer_like, copy


class Compressor:
    """Turns an array into one that is exchanged in its place, and back."""

    #: What a store's ``set_gradient_compression`` calls it; '' when the store cannot do it by itself. Not inherited: a
    #: derived class may compress in another way.
    type = ""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array to exchange, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The exchanged array in the format of the original."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves arrays as they are."""

    type = "none"

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor


class FP16Compressor(Compressor):
    """Rounds float32 and float64 to float16, and leaves the rest as it is."""

    type = "fp16"
    _dtype = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        name = mxnet_compat.dtype_name(tensor)
        return (_cast(tensor, cls._dtype), name) if name in ("float32", "float64") else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor if ctx is None else _cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Rounds float32 and float64 to bfloat16, and leaves the rest as it is."""

    type = ""
    _dtype = "bfloat16"


class Compression:
    """What gradients are rounded to before they are exchanged; pass one of these as ``compression``.

    `none`: nothing. `fp16`, `bf16`: float32 and float64 are rounded to float16 or bfloat16, and the result is cast
    back; other dtypes stay as they are. On one host workers share memory, so this saves no time. For another format
    pass a class with the static methods ``compress(tensor) -> (array to exchange, ctx)`` and
    ``decompress(array, ctx) -> array``.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def store_type(compressor: Any) -> str:
    """What a store calls a kind of compression that it does by itself; '' for others, and for derived classes."""
    kind = compressor if isinstance(compressor, type) else type(compressor)
    return str(vars(kind).get("type", ""))


def _cast(tensor: Any, dtype: Any) -> Any:
    result = buffer_like(tensor, dtype, context=mxnet_compat.context_of(tensor))
    copy(tensor, result)
    return result
