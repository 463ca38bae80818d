"""Gradient compression, in Horovod's words."""

from __future__ import annotations

from typing import Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.arrays import buffer_like, copy

__all__ = ["Compression", "Compressor"]


class Compressor:
    """Turns an array into one that is exchanged in its place, and back."""

    #: What a store's ``set_gradient_compression`` calls it; '' when the store cannot do it by itself.
    type = ""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array to exchange, and what `decompress` needs to know."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The array as it was before, with what was exchanged."""
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

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        return _rounded(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor if ctx is None else _cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Rounds float32 and float64 to bfloat16, and leaves the rest as it is."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        return _rounded(tensor, mxnet_compat.bfloat16())

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor if ctx is None else _cast(tensor, ctx)


class Compression:
    """The kinds of compression."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


def _rounded(tensor: Any, dtype: Any) -> tuple[Any, Any]:
    name = mxnet_compat.dtype_name(tensor)
    return (_cast(tensor, dtype), name) if name in ("float32", "float64") else (tensor, None)


def _cast(tensor: Any, dtype: Any) -> Any:
    result = buffer_like(tensor, dtype, context=mxnet_compat.context_of(tensor))
    copy(tensor, result)
    return result
