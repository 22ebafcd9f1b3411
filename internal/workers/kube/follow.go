package kube

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/rs/zerolog"
)

// object is what can be followed.
type object interface{ meta() Meta }

// Query names a collection.
type Query struct {
	// Path is the collection's, e.g. /api/v1/namespaces/default/pods.
	Path string
	// Labels and Fields are selectors as the API server reads them, "" for all.
	Labels, Fields string
}

// LabelSelector writes labels as a selector.
func LabelSelector(match map[string]string) string {
	parts := make([]string, 0, len(match))
	for k, v := range match {
		parts = append(parts, k+"="+v)
	}
	return strings.Join(parts, ",")
}

const (
	pageSize   = 500
	firstWait  = 200 * time.Millisecond
	longestGap = 10 * time.Second
	// longestAsked bounds what a server may ask for by Retry-After.
	longestAsked = time.Minute
	// watchFor is how long the server is asked to keep a watch, up to twice that, so
	// that not all watchers of a fleet come back at once.
	watchFor = 5 * time.Minute
	// watchGrace is how much later a watch is ended here: what stands between may hold
	// on to a connection whose server is gone.
	watchGrace = 30 * time.Second
)

// follower keeps a collection up to date.
type follower[T object] struct {
	client *Client
	query  Query
	log    zerolog.Logger
	// changed gets every object by name after the first list and after each change.
	// The map is valid during the call, calls do not overlap.
	changed func(all map[string]T)

	all     map[string]T
	version string // "" if there is nothing to watch from
	// watchFor replaces the constant in tests.
	watchFor, watchGrace time.Duration
}

// run lists and watches until ctx ends. What was known stays while the API
// server is away.
func (f *follower[T]) run(ctx context.Context) {
	wait := firstWait
	for ctx.Err() == nil {
		began := time.Now()
		err := f.step(ctx)
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			wait = firstWait
			continue
		}
		lasted := time.Since(began)
		if lost(err) {
			f.version = ""
			f.log.Debug().Err(err).Msg("nothing to watch from: listing again")
			if lasted > firstWait {
				continue
			}
		}
		if lasted > longestGap {
			wait = firstWait
		}
		pause := max(wait/2+rand.N(wait/2), min(retryAfter(err), longestAsked))
		f.log.Warn().Err(err).Dur("again_in", pause).Msg("not followed")
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		wait = min(2*wait, longestGap)
	}
}

// lost says that the server knows nothing of the version that was asked for: it
// is too old (410), newer than all that the server has, as after its store was
// restored from a backup (504), or from another store altogether (400). After
// anything else the watch goes on from where it was.
func lost(err error) bool {
	return IsCode(err, http.StatusGone) || IsCode(err, http.StatusGatewayTimeout) || IsCode(err, http.StatusBadRequest)
}

func retryAfter(err error) time.Duration {
	if status, ok := errors.AsType[*StatusError](err); ok {
		return status.RetryAfter
	}
	return 0
}

// step lists if there is no version to watch from, and watches until the server
// ends the watch in good order.
func (f *follower[T]) step(ctx context.Context) error {
	if f.version == "" {
		if err := f.list(ctx); err != nil {
			return err
		}
	}
	return f.watch(ctx)
}

func (f *follower[T]) values() url.Values {
	v := url.Values{}
	if f.query.Labels != "" {
		v.Set("labelSelector", f.query.Labels)
	}
	if f.query.Fields != "" {
		v.Set("fieldSelector", f.query.Fields)
	}
	return v
}

func (f *follower[T]) list(ctx context.Context) error {
	all := map[string]T{}
	v := f.values()
	v.Set("limit", strconv.Itoa(pageSize))
	for {
		var page struct {
			Metadata struct {
				ResourceVersion string `json:"resourceVersion"`
				Continue        string `json:"continue"`
			} `json:"metadata"`
			Items []T `json:"items"`
		}
		if err := f.client.Get(ctx, f.query.Path+"?"+v.Encode(), &page); err != nil {
			return fmt.Errorf("list %s: %w", f.query.Path, err)
		}
		for _, item := range page.Items {
			all[item.meta().Name] = item
		}
		if page.Metadata.Continue == "" {
			f.version = page.Metadata.ResourceVersion
			break
		}
		v.Set("continue", page.Metadata.Continue)
	}
	f.all = all
	f.changed(f.all)
	return nil
}

// watch applies changes until the server ends the stream.
func (f *follower[T]) watch(ctx context.Context) error {
	length := cmp.Or(f.watchFor, watchFor)
	length += rand.N(length)
	ctx, cancel := context.WithTimeout(ctx, length+cmp.Or(f.watchGrace, watchGrace))
	defer cancel()
	v := f.values()
	v.Set("watch", "true")
	v.Set("allowWatchBookmarks", "true")
	v.Set("resourceVersion", f.version)
	v.Set("timeoutSeconds", strconv.Itoa(int(length.Seconds())))
	body, err := f.client.open(ctx, http.MethodGet, f.query.Path+"?"+v.Encode(), "", nil)
	if err != nil {
		return fmt.Errorf("watch %s: %w", f.query.Path, err)
	}
	defer body.Close()
	events := json.NewDecoder(body)
	for n := 0; ; n++ {
		var ev struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		if err := events.Decode(&ev); err != nil {
			if errors.Is(err, io.EOF) && n > 0 {
				return nil
			}
			return fmt.Errorf("watch %s: %w", f.query.Path, err)
		}
		if err := f.take(ev.Type, ev.Object); err != nil {
			return fmt.Errorf("watch %s: %w", f.query.Path, err)
		}
	}
}

// take applies one event.
func (f *follower[T]) take(kind string, raw []byte) error {
	if kind == "ERROR" {
		var status StatusError
		if err := json.Unmarshal(raw, &status); err != nil {
			return err
		}
		return &status
	}
	var o T
	if err := json.Unmarshal(raw, &o); err != nil {
		return err
	}
	m := o.meta()
	switch kind {
	case "ADDED", "MODIFIED":
		f.all[m.Name] = o
	case "DELETED":
		delete(f.all, m.Name)
	}
	f.version = m.ResourceVersion
	if kind != "BOOKMARK" {
		f.changed(f.all)
	}
	return nil
}
