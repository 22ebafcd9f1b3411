//go:build !linux

package envoy

import "syscall"

// Child is as on Linux, except that the child survives if the parent dies.
func Child() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
