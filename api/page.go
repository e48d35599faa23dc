package api

import "strconv"

// PageQuery is which part of a list is requested, or where a stream of it continues.
type PageQuery struct {
	Cursor      string `query:"cursor" maxLength:"20" doc:"Only entries after this one: next_cursor of the previous page, or the seq of an entry"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"Maximum number of entries; a stream has no limit"`
	LastEventID string `header:"Last-Event-ID" maxLength:"20" doc:"Of a stream: id of the event after which it continues; takes precedence over cursor"`
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
		return 0, invalid(location, "it is not a number", hint)
	}
	return seq, nil
}

// page returns the first of a list up to the limit, and a cursor if more follow.
func page[T any](q PageQuery, list []T, seq func(T) uint64) (first []T, nextCursor string) {
	if list == nil {
		list = []T{}
	}
	if len(list) <= q.Limit {
		return list, ""
	}
	first = list[:q.Limit]
	return first, strconv.FormatUint(seq(first[q.Limit-1]), 10)
}
