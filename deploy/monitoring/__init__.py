"""Prometheus rules, the metrics page and Grafana dashboards. `python -m deploy.monitoring` writes what is generated."""
