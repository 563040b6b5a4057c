"""Tests of synchronisation: initial weights, gradients every k steps, averages of models."""
