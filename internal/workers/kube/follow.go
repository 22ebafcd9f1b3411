package kube

import (
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
	version string
}

// run lists and watches until ctx ends. What was known stays while the API
// server is away.
func (f *follower[T]) run(ctx context.Context) {
	wait := firstWait
	for ctx.Err() == nil {
		began := time.Now()
		err := f.step(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case err == nil:
			wait = firstWait
			continue
		case IsCode(err, http.StatusGone):
			f.version = ""
			f.log.Debug().Msg("watch too old: listing again")
			if time.Since(began) > firstWait {
				continue
			}
		case time.Since(began) > longestGap:
			wait = firstWait
		}
		f.log.Warn().Err(err).Dur("again_in", wait).Msg("not followed")
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait/2 + rand.N(wait/2)):
		}
		wait = min(2*wait, longestGap)
	}
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
	v := f.values()
	v.Set("watch", "true")
	v.Set("allowWatchBookmarks", "true")
	v.Set("resourceVersion", f.version)
	// Not all watchers of a fleet come back at once.
	v.Set("timeoutSeconds", strconv.Itoa(300+rand.IntN(300)))
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
