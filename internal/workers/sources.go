package workers

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvlane/kvlane/internal/config"
)

// filePoll is the interval at which a workers file is read.
const filePoll = 500 * time.Millisecond

// Static lists the workers of the configuration.
func (r *Registry) Static(list []config.Worker) { r.Set(staticSource, entries(list)) }

// staticSource is the source of the configuration.
const staticSource = "static"

func entries(list []config.Worker) []Entry {
	out := make([]Entry, len(list))
	for i := range list {
		out[i] = Entry{Worker: list[i]}
	}
	return out
}

// File lists the workers of a YAML file and follows its changes. The first read must
// succeed; if a later one fails, this is logged and the list stays.
func (r *Registry) File(path string) error {
	text, err := config.ReadFile(path)
	if err != nil {
		return fmt.Errorf("workers file: %w", err)
	}
	list, err := config.ParseWorkers(path, text)
	if err != nil {
		return err
	}
	r.Set("file", entries(list))
	r.wg.Go(func() { r.followFile(path, config.WatchFile(path, text)) })
	return nil
}

func (r *Registry) followFile(path string, watch *config.FileWatch) {
	tick := time.NewTicker(filePoll)
	defer tick.Stop()
	log := r.opts.Log.With().Str("file", path).Logger()
	for {
		select {
		case <-r.ctx.Done():
			return
		case <-tick.C:
		}
		text, changed, err := watch.Changed()
		if !changed && err == nil {
			continue
		}
		r.source("workers.file "+path, "", nil) // so that each failure and each invalid text is logged
		if err != nil {
			r.source("workers.file "+path, "workers file not read: the old list stays", err)
			continue
		}
		list, err := config.ParseWorkers(path, text)
		if err != nil {
			r.source("workers.file "+path, "workers file rejected: the old list stays", err)
			continue
		}
		log.Info().Int("workers", len(list)).Msg("workers file read")
		r.Set("file", entries(list))
	}
}

// DNS lists the addresses of a name and follows them.
func (r *Registry) DNS(d config.DNS) {
	r.wg.Go(func() {
		tick := time.NewTicker(max(d.Every.Std(), 100*time.Millisecond))
		defer tick.Stop()
		for {
			r.resolve(d)
			select {
			case <-r.ctx.Done():
				return
			case <-tick.C:
			}
		}
	})
}

func (r *Registry) resolve(d config.DNS) {
	ctx, cancel := context.WithTimeout(r.ctx, 5*time.Second)
	defer cancel()
	ips, err := net.DefaultResolver.LookupHost(ctx, d.Name)
	if r.ctx.Err() != nil {
		return
	}
	if r.source("workers.dns "+d.Name, "name not resolved: the old list stays", err); err != nil {
		return
	}
	slices.Sort(ips)
	list := make([]Entry, 0, len(ips))
	for _, ip := range slices.Compact(ips) {
		list = append(list, Entry{Worker: At(d.Worker, ip, d.Port)})
	}
	r.Set("dns:"+d.Name, list)
}

// Pool is a pool of workers, with what identifies requests for it.
type Pool struct {
	Namespace, Name string // Name is "" for a selector
	// Service and Port are the endpoint picker that the pool refers to, "" and 0 if there is none.
	Service string
	Port    int
	// Endpoints are the addresses of its workers, sorted.
	Endpoints []string
}

// At returns a template's worker at an address. If the template has no name, the address is the name.
func At(template config.Worker, ip string, port int) config.Worker {
	w := template
	if w.Name == "" {
		w.Name = net.JoinHostPort(ip, strconv.Itoa(port))
	} else {
		w.Name += "-" + ip
	}
	w.Fill(w.Name, ip, port)
	return w
}

// RankEndpoint returns the event endpoint of a worker's i-th rank: engines add the rank to the port.
func RankEndpoint(endpoint string, i int) (string, error) {
	if i == 0 {
		return endpoint, nil
	}
	rest, ok := strings.CutPrefix(endpoint, "tcp://")
	if !ok {
		return "", fmt.Errorf("endpoint %s: several ranks need tcp", endpoint)
	}
	host, port, err := net.SplitHostPort(rest)
	n, notNumber := strconv.Atoi(port)
	if err = cmp.Or(err, notNumber); err != nil {
		return "", fmt.Errorf("endpoint %s: %w", endpoint, err)
	}
	return "tcp://" + net.JoinHostPort(host, strconv.Itoa(n+i)), nil
}
