package enginesim

import "net/http"

// leg is which side of a disaggregated request an engine plays.
type leg int

const (
	legPrefill leg = iota + 1
	legDecode
)

// transfer is what a connector adds to a call.
type transfer struct {
	leg    leg
	before func() error            // before the rank gets the request: fetch blocks
	after  func(out *output) error // behind the last token: hand blocks over
	usage  func(map[string]any)
}

// connector reads a call's parameters; no transfer and no error means an ordinary request.
type connector func(c *call) (*transfer, error)

var connectors = map[string]connector{
	"nixl":      func(*call) (*transfer, error) { return nil, nil },
	"bootstrap": func(*call) (*transfer, error) { return nil, nil },
	"trtllm":    func(*call) (*transfer, error) { return nil, nil },
}

type holdings struct{}

func (h *holdings) init(*Engine) {}
func (h *holdings) close()       {}
func (h *holdings) clear()       {}
func (h *holdings) size() int    { return 0 }

type rooms struct{}

func (r *rooms) init() {}

func (e *Engine) transferRoutes(*http.ServeMux) {}
func (e *Engine) bootstrapMux() http.Handler    { return http.NewServeMux() }
