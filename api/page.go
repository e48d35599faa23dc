package api

import (
	"context"
	"strconv"

	"github.com/danielgtaylor/huma/v2"
)

// PageQuery is the part of a request's input that selects a page of a list, or where a
// stream of it resumes.
type PageQuery struct {
	Cursor      string `query:"cursor" maxLength:"20" doc:"Only entries after this one: next_cursor of the previous page, or the seq of an entry"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of entries; a stream has no limit"`
	LastEventID string `header:"Last-Event-ID" maxLength:"20" doc:"Of a stream: id of the event after which it resumes; takes precedence over cursor"`
}

// after returns the seq after which the list or the stream continues.
func (q PageQuery) after() (uint64, error) {
	cursor, location, hint := q.Cursor, "query.cursor", "use next_cursor of the previous page, or the seq of an entry"
	if q.LastEventID != "" {
		cursor, location, hint = q.LastEventID, "header.Last-Event-ID", "send the id of the last event that you have"
	}
	if cursor == "" {
		return 0, nil
	}
	seq, err := strconv.ParseUint(cursor, 10, 64)
	if err != nil {
		return 0, invalid(location, "not a number", hint)
	}
	return seq, nil
}

// page returns the start of a list up to the limit, and a cursor if there is more.
func page[T any](q PageQuery, list []T, seq func(T) uint64) (first []T, nextCursor string) {
	if len(list) <= q.Limit {
		return list, ""
	}
	first = list[:q.Limit]
	return first, formatID(seq(first[q.Limit-1]))
}

// log is a list in memory that clients read by page or follow as a stream.
type log[T any] struct {
	list func() []T
	// follow returns the list and then new entries, until its channel is closed: the
	// subject was deleted or the node shuts down.
	follow func() (entries <-chan T, stop func())
	seq    func(T) uint64
	page   func(entries []T, nextCursor string) any
	event  func(T) (name string, data any)
}

// serveLog responds with a page of a log, or with a stream of it.
func serveLog[T any](ctx context.Context, a *API, x Exchange, q PageQuery, l log[T]) (*huma.StreamResponse, error) {
	if !wantsEvents(x.r) {
		entries, next := page(q, l.list(), l.seq)
		return jsonResponse(x, l.page(entries, next)), nil
	}
	return a.respondEvents(ctx, x, func(s *eventStream) {
		entries, stop := l.follow()
		defer stop()
		for {
			select {
			case <-s.ctx.Done():
				s.fail(context.Cause(s.ctx))
				return
			case entry, ok := <-entries:
				if !ok {
					return
				}
				name, data := l.event(entry)
				if s.send(name, formatID(l.seq(entry)), data) != nil {
					return
				}
			}
		}
	})
}

func formatID(n uint64) string { return strconv.FormatUint(n, 10) }
