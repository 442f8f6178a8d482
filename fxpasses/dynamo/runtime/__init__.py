"""Operators that stand for calls which Dynamo cannot trace."""
