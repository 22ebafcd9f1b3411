package extproc

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/health/grpc_health_v1"
)

// RegisterHealth puts only the health service on g: a further port for probes
// that should not reach ext_proc.
func (s *Server) RegisterHealth(g grpc.ServiceRegistrar) {
	grpc_health_v1.RegisterHealthServer(g, s.health)
}
