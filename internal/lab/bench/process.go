package main

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of processor times in /proc on Linux.
const tick = 10 * time.Millisecond

// processorTime is the CPU time of a process, user and system, to one tick.
func processorTime(pid int) (time.Duration, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	// The second field is the name in parentheses; user and system time are fields 14 and 15.
	fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat has %d fields", pid, len(fields))
	}
	var sum time.Duration
	for _, f := range fields[11:13] {
		n, err := strconv.ParseInt(string(f), 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	return sum, nil
}

// memory is the resident memory of a process in MiB: its own pages, and those mapped from files (its binary).
type memory struct{ own, files int }

func (m memory) String() string {
	return fmt.Sprintf("%d MB (%d of files)", m.own+m.files, m.files)
}

func residentMemory(pid int) (m memory, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return m, err
	}
	for _, line := range []struct {
		name string
		to   *int
	}{{"RssAnon:", &m.own}, {"RssFile:", &m.files}} {
		_, rest, ok := strings.Cut(string(text), line.name)
		if !ok {
			return m, fmt.Errorf("/proc/%d/status has no %s", pid, line.name)
		}
		kib, err := strconv.Atoi(strings.Fields(rest)[0])
		if err != nil {
			return m, fmt.Errorf("/proc/%d/status: %s %w", pid, line.name, err)
		}
		*line.to = (kib + 512) >> 10
	}
	return m, nil
}
