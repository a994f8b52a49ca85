/** Starts the KV view. */
import { mount } from 'svelte';
import '../app.css';
import KvPage from './KvPage.svelte';
import { View } from './view.svelte';

const target = document.getElementById('app');
if (target === null) throw new Error('kv.html lacks #app');
mount(KvPage, { target, props: { view: new View(new URL('./', location.href)) } });
