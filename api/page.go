package api

import "strconv"

// PageQuery is which part of a list is wanted, or where a stream of it goes on.
type PageQuery struct {
	After       uint64 `query:"after" doc:"Only those with a higher seq"`
	Limit       int    `query:"limit" minimum:"1" maximum:"1000" default:"100" doc:"How many at most; a stream has no limit"`
	LastEventID string `header:"Last-Event-ID" maxLength:"20" doc:"Of a stream: go on after this one; wins over after"`
}

// after is the seq after which the client wants to go on.
func (q PageQuery) after() (uint64, error) {
	if q.LastEventID == "" {
		return q.After, nil
	}
	seq, err := strconv.ParseUint(q.LastEventID, 10, 64)
	if err != nil {
		return 0, invalid("header.Last-Event-ID", "it is not a number", "send the id of the last event that you have")
	}
	return seq, nil
}

// page returns the first of a list up to the limit, and the seq of the last of them if
// more follow.
func page[T any](q PageQuery, list []T, seq func(T) uint64) (first []T, next uint64) {
	if len(list) > q.Limit {
		list = list[:q.Limit]
		next = seq(list[q.Limit-1])
	}
	if list == nil {
		list = []T{}
	}
	return list, next
}
