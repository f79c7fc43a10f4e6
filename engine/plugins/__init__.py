"""Plugins around a backend; loaded only where a configuration names one."""
