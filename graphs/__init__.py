"""The kernels, capture and replay of a decode step that looks its experts up on the device."""
