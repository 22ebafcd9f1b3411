package extproc

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// RegisterHealth registers only the health service on g: an additional port for probes that
// should not reach ext_proc.
func (s *Server) RegisterHealth(g grpc.ServiceRegistrar) {
	grpc_health_v1.RegisterHealthServer(g, s.health)
}
