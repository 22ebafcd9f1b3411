//go:build !linux

package envoy

import "syscall"

// Child is as on Linux, but for the kernel, which lets the child live if the parent dies.
func Child() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
