# Names that are set as base_train's options of 2025 were.
depth = 4
max_seq_len = 256
device_batch_size = 4
total_batch_size = 4096
num_iterations = 50
window_pattern = "L"
run = "small-one"
computed = depth * 64
