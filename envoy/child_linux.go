package envoy

import "syscall"

// Child returns the attributes of a child process: its own process group, so that Ctrl-C reaches only the parent and answers can
// drain; the kernel kills it if the parent dies.
func Child() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
