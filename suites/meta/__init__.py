"""Tests of pdlcheck itself: checks reject broken subjects; plugin, worlds and command are tested from outside."""
