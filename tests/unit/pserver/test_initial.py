import hashlib

import numpy as np

from paddlewheel.pserver.config import TableConfig
from paddlewheel.pserver.initializer import Initializer, codebook


def test_the_codebook_never_changes():
    """A checkpoint holds changes from these values: another codebook would be another model."""
    found = codebook("default", width=4, initial_range=0.01, seed=1)
    np.testing.assert_allclose(found[0], [0.00036195, 0.0079618, -0.00531762, 0.00059152], atol=1e-8)
    assert (
        hashlib.sha256(found.tobytes()).hexdigest()
        == "a04611d748ad0d177ed3c162d5c97f52529d309cbf4afb13c4b63c0f3f56c639"
    )


def test_it_is_uniform_and_depends_on_seed_and_name():
    found = codebook("default", width=8, initial_range=0.5, seed=1)
    assert found.shape == (65536, 8)
    assert found.min() >= -0.5
    assert found.max() < 0.5
    np.testing.assert_allclose(np.histogram(found, 10, (-0.5, 0.5))[0], found.size / 10, rtol=0.02)
    assert abs(np.corrcoef(found.T) - np.eye(8)).max() < 0.02
    assert not np.array_equal(found, codebook("default", 8, 0.5, seed=2))
    assert not np.array_equal(found, codebook("other", 8, 0.5, seed=1))


def test_effective_values():
    config = TableConfig(width=2, initial_range=0.1, admission_threshold=2)
    table = Initializer("t", config, seed=0)
    keys = np.array([1, 1 << 40, 65537, (1 << 64) - 1], np.uint64)
    change = np.arange(12, dtype=np.float32).reshape(4, 3)
    admitted = table.admitted(np.array([1, 2, 3, 0], np.float32), np.zeros(4, np.float32))
    np.testing.assert_array_equal(admitted, [False, True, True, False])
    values = table.effective(change, keys, admitted)
    book = codebook("t", 2, 0.1, 0)
    np.testing.assert_array_equal(values[:, 0], change[:, 0])
    np.testing.assert_array_equal(values[1, 1:], book[0] + change[1, 1:])
    np.testing.assert_array_equal(values[2, 1:], book[1] + change[2, 1:])
    np.testing.assert_array_equal(values[[0, 3], 1:], 0)


def test_the_score_weighs_shows_and_clicks():
    config = TableConfig(admission_threshold=2, unclicked_weight=0.1, clicked_weight=1.0)
    table = Initializer("t", config, seed=0)
    shows, clicks = np.array([20, 19, 2, 2], np.float32), np.array([0, 0, 2, 1], np.float32)
    np.testing.assert_array_equal(table.admitted(shows, clicks), [True, False, True, False])
