"""Broken training programs, each with its correct verdict, and healthy programs that look broken."""
