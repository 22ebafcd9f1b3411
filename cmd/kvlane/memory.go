package main

import (
	"os"
	"runtime/debug"
)

// collectPercent is how much garbage the heap may gather, in percent of what is in
// use. Most of the heap is caches and the index, which hold few pointers, and caches
// use their memory again: to look through the heap costs little and is needed seldom,
// so 15 takes no more processor time than Go's own 100 that could be measured, and far
// less memory. At 10 it shows. GOGC and GOMEMLIMIT in the environment win.
const collectPercent = 15

// boundMemory sets the garbage collector for a service that keeps caches.
func boundMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectPercent)
	}
}
