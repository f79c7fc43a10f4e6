"""Plugins around a backend; loaded only if the configuration names one."""
