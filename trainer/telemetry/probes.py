"""What a running worker is asked at the time of a scrape: the server's brpc page, the trainer's GPUs.

Never Paddle's tables: a server that is asked for key counts during a load or a day boundary may crash. Trainer 0, which
has these done, counts keys between them and tells the coordinator.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Collection
from typing import Any

from paddlewheel.pserver.admin import brpc_metrics, table_statistics
from paddlewheel.pserver.messages import ServerSpec
from paddlewheel.trainer.telemetry.series import Series

_TIMEOUT_SECONDS = 1.5
_SERVICE = "paddle_distributed_ps_service_service"
_QUANTILES = ("0.8", "0.9", "0.99", "0.999", "1")


class ServerProbe:
    """Asks one parameter server. brpc's page has about 500 lines, with the port in their names; these few matter.

    brpc's latency `_sum` is the last seconds' mean times the count: it can shrink, is no counter, and is left out.
    """

    def __init__(self, host: str, port: int, tables: Collection[str] = ()) -> None:
        """tables: those that are for sure of our own engine, which can be asked at any time."""
        self._host, self._port, self._tables = host, port, tables

    @classmethod
    def of_worker(cls, spec: ServerSpec) -> ServerProbe:
        """For the server that was started with this specification."""
        host, port = spec.address
        return cls(host.strip("[]"), port, [name for name, table in spec.tables.items() if table.is_ours_for_sure])

    def __call__(self, series: Series) -> None:
        """Raises ServerError (an OSError) when the server does not answer."""
        page = brpc_metrics(self._host, self._port, timeout_seconds=_TIMEOUT_SECONDS)
        prefix = f"rpc_server_{self._port}"
        for operation in ("pull", "push"):
            name = f"cost_profiler_pserver_server_{operation}_sparse_count"
            series.follow("paddlewheel_pserver_requests_total", page.get(name, 0.0), operation=operation)
        series.follow("paddlewheel_pserver_request_errors_total", page.get(f"{prefix}_{_SERVICE}_error", 0.0))
        for quantile in _QUANTILES:
            microseconds = page.get(f'{prefix}_{_SERVICE}{{quantile="{quantile}"}}', 0.0)
            series.set("paddlewheel_pserver_request_latency_seconds", microseconds / 1e6, quantile=quantile)
        series.set("paddlewheel_pserver_requests_in_flight", page.get(f"{prefix}_{_SERVICE}_concurrency", 0.0))
        series.set("paddlewheel_pserver_connections", page.get("rpc_socket_count", 0.0))
        series.set("paddlewheel_pserver_uptime_seconds", page.get(f"{prefix}_uptime", 0.0))
        for table in self._tables:
            found = table_statistics(self._host, self._port, table, timeout_seconds=_TIMEOUT_SECONDS)
            series.set("paddlewheel_pserver_table_keys", float(found.rows), table=table)
            memory = found.row_bytes + found.index_bytes + found.kept_bytes
            series.set("paddlewheel_pserver_table_memory_bytes", float(memory), table=table)
            series.follow("paddlewheel_pserver_table_evicted_keys_total", float(found.evicted), table=table)


def gpu_probe() -> Callable[[Series], None] | None:
    """A probe of this machine's NVIDIA GPUs; None without nvidia-ml-py or without a driver."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # noqa: BLE001 -- whatever is wrong with a driver must not stop training
        return None

    def probe(series: Series) -> None:
        with contextlib.suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                memory = nvml.nvmlDeviceGetMemoryInfo(handle).used
                busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                series.set("paddlewheel_trainer_gpu_memory_bytes", memory, gpu=str(index))
                series.set("paddlewheel_trainer_gpu_utilization_ratio", busy / 100, gpu=str(index))

    return probe
