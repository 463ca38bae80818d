"""`DistributedMetric`: the values of one process that has seen the batches of all workers."""

import collections
import copy
import math
import pickle
import re
import threading

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError, MismatchError
from support.gluon import is_mxnet_2

mx = pytest.importorskip("mxnet")
library = mx.gluon.metric if is_mxnet_2() else mx.metric

CLASSES = 4


def batches(count, kind, seed=0):
    """Labels and predictions; each batch has another number of samples."""
    draw, made = np.random.RandomState(seed), []
    for number in range(count):
        samples = 3 + number % 4
        if kind == "classes":
            label, pred = draw.randint(0, CLASSES, samples), draw.dirichlet(np.ones(CLASSES), samples)
        elif kind == "many classes":
            label, pred = draw.randint(0, 60, samples), draw.randint(0, 60, samples)
        elif kind == "binary":
            label, pred = draw.randint(0, 2, samples), draw.dirichlet(np.ones(2), samples)
        else:
            label, pred = draw.normal(size=(samples, 1)), draw.normal(size=(samples, 1)) + 1
        array = mx.np.array if is_mxnet_2() else mx.nd.array
        made.append(([array(label, dtype="float32")], [array(pred, dtype="float32")]))
    return made


def squares(label, pred):
    return float(((label - pred) ** 2).sum()), label.size


class TwoSums(library.EvalMetric):
    """As metrics of object detection: with a list of sums."""

    def reset(self):
        self.num_inst, self.sum_metric = [0, 0], [0.0, 0.0]

    reset_local = reset

    def update(self, labels, preds):
        for at in range(2):
            self.num_inst[at] += 1 + at
            self.sum_metric[at] += float(preds[0].asnumpy()[at].sum())

    def get(self):
        pairs = zip(self.sum_metric, self.num_inst)
        return ["first", "second"], [total / number if number else math.nan for total, number in pairs]


class LateArray(library.EvalMetric):
    """Its sum becomes an array of MXNet with the first batch."""

    def update(self, labels, preds):
        self.sum_metric = self.sum_metric + (labels[0] - preds[0]).sum(axis=0)
        self.num_inst += 1

    def get(self):
        return self.name, float((self.sum_metric / self.num_inst).asnumpy().sum()) if self.num_inst else math.nan


class LateList(TwoSums):
    def reset(self):
        self.num_inst = self.sum_metric = None

    reset_local = reset

    def update(self, labels, preds):
        if self.num_inst is None:
            super().reset()
        super().update(labels, preds)

    def get(self):
        return super().get() if self.num_inst else ([], [math.nan])


METRICS = [
    (TwoSums("two"), "numbers", {}),
    (LateArray("late"), "numbers", {}),
    (LateList("later"), "numbers", {}),
    ("acc", "classes", {}),
    ("top_k_accuracy", "classes", {"top_k": 2}),
    ("ce", "classes", {}),
    ("perplexity", "classes", {} if is_mxnet_2() else {"ignore_label": None}),
    ("pcc", "classes", {}),
    ("pcc", "many classes", {}),  # a matrix that takes a second operation
    ("f1", "binary", {"average": "micro", "name": "macro"}),
    ("f1", "binary", {"average": "macro"}),
    ("mcc", "binary", {}),
    ("mae", "numbers", {}),
    ("rmse", "numbers", {}),
    ("pearsonr", "numbers", {} if is_mxnet_2() else {"average": "micro"}),
    ("pearsonr", "numbers", {}),
    (squares, "numbers", {}),
    (["mse", "mae"], "numbers", {}),
]
if is_mxnet_2():
    METRICS += [(library.Fbeta(beta=2), "binary", {}), (library.BinaryAccuracy(), "numbers", {})]
    METRICS += [(library.MeanPairwiseDistance(), "numbers", {}), (library.MeanCosineSimilarity(), "numbers", {})]


@pytest.mark.sizes
@pytest.mark.parametrize(("name", "kind", "options"), METRICS)
def test_values_are_those_of_one_process(rank, size, name, kind, options):
    """Also where the first worker has no sample, or the third; a get changes nothing."""
    own, all_of_them = hvd.DistributedMetric(name, **options), library.create(name, **options)
    for part in range(2):
        for number, (label, pred) in enumerate(batches(7, kind, seed=part)):
            all_of_them.update(label, pred)
            if number % min(size, 2) == (rank if part else size - 1 - rank):
                own.update(label, pred)
        for method in ("get", "get_name_value", "get_global", "get_global_name_value"):
            if hasattr(all_of_them, method):
                assert_same(getattr(own, method)(), getattr(all_of_them, method)())
        assert hvd.allgather_object(own.get()) == [own.get()] * size
        if hasattr(own, "reset_local"):
            own.reset_local()
            all_of_them.reset_local()
    own.reset()
    assert math.isnan(np.ravel(own.get()[1])[0])


def assert_same(found, expected):
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other)
    elif isinstance(expected, str):
        assert found == expected
    else:
        np.testing.assert_allclose(np.asarray(found, float), np.asarray(expected, float), rtol=1e-6)


def test_what_mxnet_asks_of_a_metric(rank, size):
    """Its class, name, configuration and copies; its text waits for nobody."""
    metric = hvd.DistributedMetric(library.Loss("first"))
    assert isinstance(metric, library.Loss)
    metric.name = "second"
    copies = [metric, copy.deepcopy(metric), pickle.loads(pickle.dumps(metric))]
    for each in copies:
        each.update(None, [mx.np.ones(2) if is_mxnet_2() else mx.nd.ones(2)] if rank == 0 else [])
        assert each.get() == ("second", 1.0)
    if rank == 0:
        assert re.fullmatch(r"EvalMetric: {'second': (np\.float32\()?1\.0\)?}", str(metric))
    again = library.create(library.CompositeEvalMetric([metric, "acc"]))
    assert hvd.DistributedMetric(again).get()[1][0] == 1.0
    assert metric.get_config()["metric"] == "Loss"


class Kept(library.EvalMetric):
    """Of a program: not only sums."""

    def __init__(self, name, state):
        self.state, self.used = state, mx.gluon.nn.Dense(1)
        super().__init__(name)

    def reset(self):
        super().reset()
        self.seen = self.state()

    def update(self, labels, preds):
        self.seen += preds
        self.num_inst += 1


class Total:
    def __init__(self):
        self.total = 0

    def __iadd__(self, values):
        self.total += sum(values)
        return self

    def __call__(self):
        return self.total


@pytest.mark.parametrize("state", [list, lambda: np.zeros(1), collections.deque, Total])
def test_what_cannot_be_merged_is_refused_on_every_worker(rank, size, state):
    metric = hvd.DistributedMetric(Kept("median", state))
    if rank == size - 1:
        metric.update(0, [1])
    if size == 1:
        assert metric.get() == ("median", 0.0)
        return
    with pytest.raises(InvalidRequestError, match=f"rank {size - 1}: Kept has seen"):
        metric.get()
    metric.reset()
    assert math.isnan(metric.get()[1])
    metric.seen = threading.Lock()  # the reset of a copy could change it
    with pytest.raises(InvalidRequestError, match="rank 0: Kept has seen, which cannot be copied"):
        metric.get()


def test_a_metric_uses_the_objects_of_the_program(rank, size):
    """A method is that of its object, which may have what cannot be copied; parts of a list are distributed, too."""

    class Weighted:
        weight = 1

        def value(self, label, pred):
            return self.weight * float(pred.sum()), 1

    weighted, locked = Weighted(), Weighted()
    locked.lock = threading.Lock()
    metrics = hvd.DistributedMetric([weighted.value, locked.value, library.Loss()])
    weighted.weight = locked.weight = 2
    values = (mx.np if is_mxnet_2() else mx.nd).array([rank + 1.0])
    metrics.update([values], [values])
    mean = (size + 1) / 2
    assert metrics.get()[1] == [2 * mean, 2 * mean, mean]
    assert metrics.get_metric(2).get()[1] == mean


def test_other_metrics_on_one_worker(rank, size):
    metric = hvd.DistributedMetric(["acc", "mse"] if rank else ["acc"])
    if size > 1:
        differ = "rank 0: .*Accuracy 'accuracy'\n  rank 1: .*Accuracy 'accuracy', MSE 'mse'"
        with pytest.raises(MismatchError, match=differ):
            metric.get()
