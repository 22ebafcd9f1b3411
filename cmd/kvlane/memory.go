package main

import (
	"os"
	"runtime/debug"
)

// collectPercent is how much garbage the heap may gather, in percent of what is in
// use. Most of the heap is caches and the index, which hold few pointers: to look
// through them costs little, so 25 takes no more processor time than Go's own 100
// that could be measured, and a third less memory. Below 15 it shows. GOGC and
// GOMEMLIMIT in the environment win.
const collectPercent = 25

// boundMemory sets the garbage collector for a service that keeps caches.
func boundMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(collectPercent)
	}
}
