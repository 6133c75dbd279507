"""nvidia-resiliency-ext: in-process restarts, and sections of ft_launcher."""
