package kube

import (
	"context"
	"errors"
	"io"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/kvlane/kvlane/internal/workers"
)

// collection is a resource to be watched.
type collection struct {
	from                cache.Getter
	resource, namespace string
	// labels and fields are selectors as the API server reads them, "" for all.
	labels, fields string
	// failed is called with each error of listing or watching the collection, and with nil when a watch begins.
	failed func(err error)
}

// follow watches a collection with an informer until ctx ends. It calls changed with all objects after the first list
// and after changes, which may be combined. While the API server is unavailable, the last state stays. changed must not
// modify the objects. Calls do not overlap.
func follow[T any, P interface {
	*T
	runtime.Object
}](ctx context.Context, c collection, changed func(all []P)) {
	source := cache.NewFilteredListWatchFromClient(c.from, c.resource, c.namespace, func(o *metav1.ListOptions) {
		o.LabelSelector, o.FieldSelector = c.labels, c.fields
	})
	failed := func(err error) {
		routine := errors.Is(err, io.EOF) || apierrors.IsResourceExpired(err) || apierrors.IsGone(err) || apierrors.IsInvalid(err)
		if ctx.Err() == nil && !routine { // the end of ctx ends them, too; invalid is a list by a watch for an old server
			c.failed(err)
		}
	}
	watches := source.WatchFuncWithContext
	source.WatchFuncWithContext = func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
		w, err := watches(ctx, o)
		failed(err) // a refused connection and 429 do not reach the handler below
		return w, err
	}
	informer := cache.NewSharedIndexInformerWithOptions(source, P(new(T)), cache.SharedIndexInformerOptions{ObjectDescription: c.resource})
	dirty := make(chan struct{}, 1)
	mark := func() { workers.Poke(dirty) }
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { mark() }, UpdateFunc: func(any, any) { mark() }, DeleteFunc: func(any) { mark() },
	})
	// These three return errors only if an informer is already running.
	utilruntime.Must(err)
	utilruntime.Must(informer.SetTransform(withoutManagers))
	utilruntime.Must(informer.SetWatchErrorHandlerWithContext(func(_ context.Context, _ *cache.Reflector, err error) { failed(err) }))

	var running sync.WaitGroup
	running.Go(func() { informer.RunWithContext(ctx) })
	defer running.Wait()
	select {
	case <-informer.HasSyncedChecker().Done():
	case <-ctx.Done():
		return
	}
	mark()
	workers.Paced(ctx, dirty, func() {
		known := informer.GetStore().List()
		all := make([]P, len(known))
		for i := range known {
			all[i] = known[i].(P)
		}
		changed(all)
	})
}

// withoutManagers drops managedFields, which are most of an object's memory.
func withoutManagers(object any) (any, error) {
	if m, ok := object.(metav1.Object); ok {
		m.SetManagedFields(nil)
	}
	return object, nil
}
