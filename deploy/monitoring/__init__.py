"""Prometheus rules, the metrics page and Grafana dashboards. `python -m paddlewheel.deploy.monitoring` writes what is
generated.
"""
