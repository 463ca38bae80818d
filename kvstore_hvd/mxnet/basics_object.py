"""The basics as methods of one object, as some programs use Horovod: ``mpi_ops._basics``."""

from __future__ import annotations

from kvstore_hvd.mxnet import basics
from kvstore_hvd.mxnet.reduce_ops import Adasum, Average, Max, Min, Product, Sum

__all__ = ["HorovodBasics"]


class HorovodBasics:
    """The functions of `kvstore_hvd.mxnet.basics` and the ops; every object is as good as any other."""

    Average = Average
    Sum = Sum
    Adasum = Adasum
    Min = Min
    Max = Max
    Product = Product

    init = staticmethod(basics.init)
    shutdown = staticmethod(basics.shutdown)
    is_initialized = staticmethod(basics.is_initialized)
    start_timeline = staticmethod(basics.start_timeline)
    stop_timeline = staticmethod(basics.stop_timeline)
    size = staticmethod(basics.size)
    local_size = staticmethod(basics.local_size)
    cross_size = staticmethod(basics.cross_size)
    rank = staticmethod(basics.rank)
    local_rank = staticmethod(basics.local_rank)
    cross_rank = staticmethod(basics.cross_rank)
    is_homogeneous = staticmethod(basics.is_homogeneous)
    mpi_threads_supported = staticmethod(basics.mpi_threads_supported)
    mpi_enabled = staticmethod(basics.mpi_enabled)
    mpi_built = staticmethod(basics.mpi_built)
    gloo_enabled = staticmethod(basics.gloo_enabled)
    gloo_built = staticmethod(basics.gloo_built)
    nccl_built = staticmethod(basics.nccl_built)
    ddl_built = staticmethod(basics.ddl_built)
    ccl_built = staticmethod(basics.ccl_built)
    cuda_built = staticmethod(basics.cuda_built)
    rocm_built = staticmethod(basics.rocm_built)

    def __init__(self, *library: str) -> None:
        self.library = library
