"""Activation statistics: how they are collected and stored."""
