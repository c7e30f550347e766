"""Tells a change from noise, and measures how often it errs."""
